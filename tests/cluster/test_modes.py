"""Switching modes on a real cluster whose kubelet has its default tick: node.status is up to 10 s behind."""

from collections.abc import AsyncIterator

import anyio
import pytest

from agent.model.pod import VGPU
from agent.simulator.kubelet.pod_specs import Phase
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios import modes
from tests.scenarios.mode_node import mode_node, pod_of
from tests.scenarios.mode_streams import switches
from tests.scenarios.modes import (
    test_agent_kill_in_mid_switch,
    test_agent_update_under_a_stream_of_pods,
    test_api_server_outage_in_mid_switch,
    test_busy_gpus_drain_under_a_backlog,
    test_kubelet_restart_in_mid_switch,
    test_label_flapping,
    test_no_admission_error_across_thirty_switches,
    test_three_modes_in_turn_on_an_idle_node,
    test_three_modes_side_by_side,
    test_time_slicing_layout,
    test_unknown_label_changes_nothing,
    test_whenbusy_refuse,
)

__all__ = [
    "test_agent_kill_in_mid_switch",
    "test_agent_update_under_a_stream_of_pods",
    "test_api_server_outage_in_mid_switch",
    "test_busy_gpus_drain_under_a_backlog",
    "test_kubelet_restart_in_mid_switch",
    "test_label_flapping",
    "test_no_admission_error_across_thirty_switches",
    "test_three_modes_in_turn_on_an_idle_node",
    "test_three_modes_side_by_side",
    "test_time_slicing_layout",
    "test_unknown_label_changes_nothing",
    "test_whenbusy_refuse",
]

LIMIT = 60 + 30 * switches()
"""Seconds for the body of one test (see conftest.py)."""


@pytest.fixture
async def rig(patient: Cluster) -> AsyncIterator[RealRig]:
    """In place of the rig on the session's quick cluster."""
    async with real_rig(patient) as made:
        yield made


BURST, LATER, TURNS = 40, 20, 5


async def test_sigterm_in_a_burst_of_pods(rig: RealRig) -> None:
    """An agent that ends while pods pour in leaves neither figures nor its taint behind."""
    async with mode_node(rig) as node:
        await node.want("vgpu")
        await node.applied("vgpu")
        for turn in range(TURNS):
            await node.offers("vgpu")
            burst = [pod_of("vgpu", f"burst-{turn}-{number}") for number in range(BURST)]
            later = [pod_of("vgpu", f"later-{turn}-{number}") for number in range(LATER)]
            async with anyio.create_task_group() as group:
                for pod in burst:
                    group.start_soon(rig.create_pod, pod)
            assert await rig.stop_agent() == 0
            assert [await rig.allocatable(name) for name in (VGPU.core, VGPU.memory)] == [0, 0]
            assert not (await rig.node()).taints
            async with anyio.create_task_group() as group:
                for pod in later:
                    group.start_soon(rig.create_pod, pod)
            await anyio.sleep(2.0)
            phases = await rig.all_pods()
            assert {phases[pod.name][0] for pod in later} == {Phase.PENDING}
            died = [name for name, (phase, _, _) in phases.items() if phase is Phase.FAILED]
            print(f"turn {turn}: {len(died)} of {BURST} of the burst were refused, 0 of {LATER} afterwards")
            async with anyio.create_task_group() as group:
                for pod in (*burst, *later):
                    group.start_soon(rig.delete_pod, pod)
            await node.start()


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in modes.ALL} == set(__all__)
