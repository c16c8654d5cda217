"""Switching modes by the node's label: nothing is handed out twice and no pod is lost, whatever happens.

Each runs on a fresh node with 8 GPUs (see `rig.py`), on the embedded kubelet and on the real cluster. In each
of them every list message that the agent sent is held to the rule that no GPU is in two modes at once.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from agent.modes.desired import LABEL
from agent.node.conditions import MODE_LABEL
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.pace import scaled
from tests.scenarios.mode_node import COUNTED, GPUS, SHARED, ModeNode, mode_node, pod_of
from tests.scenarios.mode_streams import (
    test_agent_update_under_a_stream_of_pods,
    test_label_flapping,
    test_no_admission_error_across_thirty_switches,
)
from tests.scenarios.rig import GPU, Rig
from tests.scenarios.skeleton import unschedulable

LAYOUTS = {
    "mixed": [
        {"gpus": ["0-2"], "mode": "pgpu"},
        {"gpus": ["3-5"], "mode": "vgpu"},
        {"gpus": ["rest"], "mode": "mps"},
    ],
    "sliced": [{"gpus": ["rest"], "mode": "pgpu", "replicas": 4}],
}


async def serving(node: ModeNode, mode: str) -> None:
    """The node offers all GPUs in a mode."""
    await node.want(mode)
    await node.applied(mode)
    await node.offers(mode)


async def test_three_modes_in_turn_on_an_idle_node(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await node.applied("none")
        for turn, mode in enumerate(("pgpu", "vgpu", "mps", "pgpu")):
            await serving(node, mode)
            for other, (resource, _) in COUNTED.items():
                if other != mode:
                    assert not await rig.allocatable(resource)
                    await node.gone(resource)
            pods = await node.run(mode, f"{mode}-{turn}-a", f"{mode}-{turn}-b")
            for pod in pods:
                nodes = await rig.container_device_nodes(pod, "main")
                assert rig.device_node(rig.gpu_uuids()[await node.index_of(pod)]) in nodes
            await node.end(*pods)
        await node.want("disable")
        await node.applied("none")
        await rig.wait_allocatable(0, GPU)
        assert "ModeApplied" in await rig.event_reasons()


async def test_busy_gpus_drain_under_a_backlog(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await serving(node, "pgpu")
        holders = await node.run("pgpu", "holder-0", "holder-1", "holder-2")
        busy = {await node.index_of(pod) for pod in holders}
        await node.want("vgpu")
        # Pods of the old mode keep coming, and none of them is offered a GPU that is on its way out.
        backlog = [pod_of("pgpu", f"backlog-{number}") for number in range(10)]
        late = backlog[5:]
        told = await node.reach("switching", "vgpu")
        for pod in backlog[:5]:
            await node.create(pod)
        await node.offers("vgpu", 5)
        waits = {index for index, gpu in told["gpus"].items() if gpu.get("waitingFor")}
        assert waits == {str(index) for index in busy}
        await node.condition("False", "Switching")
        (early,) = await node.run("vgpu", "early")
        assert await node.index_of(early) not in busy
        for number, holder in enumerate(holders):
            await node.create(late[number])
            await node.end(holder)
            await node.offers("vgpu", 6 + number)
        await node.applied("vgpu")
        for name, (phase, *_) in (await rig.all_pods()).items():
            assert (phase is Phase.PENDING) is name.startswith("backlog"), f"{name} is {phase}"
        # They run as soon as the node is theirs again.
        await node.end(early)
        await node.want("pgpu")
        for pod in (*backlog[:5], *late[:3]):
            await rig.wait_phase(pod, Phase.RUNNING, 60.0)


async def test_three_modes_side_by_side(rig: Rig) -> None:
    async with mode_node(rig, layouts=LAYOUTS) as node:
        await node.want("mixed")
        await node.applied("mixed")
        for mode, gpus in (("pgpu", 3), ("vgpu", 3), ("mps", 2)):
            await node.offers(mode, gpus)
        pods = {mode: (await node.run(mode, f"{mode}-a", f"{mode}-b")) for mode in ("pgpu", "vgpu", "mps")}
        allowed = {"pgpu": {0, 1, 2}, "vgpu": {3, 4, 5}, "mps": {6, 7}}
        for mode, some in pods.items():
            assert {await node.index_of(pod) for pod in some} <= allowed[mode]
        # From here to a single mode: what is busy in that mode already is not touched.
        await node.want("vgpu")
        await node.reach("switching", "vgpu")
        await node.end(*pods["pgpu"], *pods["mps"])
        await node.offers("vgpu")
        await node.applied("vgpu")
        assert [await rig.phase(pod) for pod in pods["vgpu"]] == [Phase.RUNNING] * 2


async def test_time_slicing_layout(rig: Rig) -> None:
    quick = {f"health__quiet__{kind}": 0.5 for kind in ("needsReset", "needsReboot", "lost", "probe")}
    quick["health__probeSeconds"] = 0.2
    async with mode_node(rig, layouts=LAYOUTS, timeSlicing__refuseMoreThanOne=True, **quick) as node:
        await node.want("sliced")
        await node.applied("sliced")
        await rig.wait_allocatable(4 * GPUS)
        pods = await node.run("pgpu", *(f"slice-{number}" for number in range(GPUS + 2)))
        load = [await node.index_of(pod) for pod in pods]
        assert sorted(load.count(index) for index in range(GPUS)) == [1] * 6 + [2] * 2
        greedy = PodSpec("greedy", (ContainerSpec("main", {GPU: 2}),))
        await node.create(greedy)
        await rig.wait_phase(greedy, Phase.FAILED)
        assert "ask for 1" in await rig.message(greedy)
        await node.end(greedy)
        # A bad GPU takes all of its slices with it, those in use included.
        rig.machine.fall_off_bus(rig.gpu_uuids()[0])
        await rig.wait_allocatable(4 * (GPUS - 1))
        await anyio.sleep(1.0)  # a reset is not over within one probe
        rig.machine.restore(rig.gpu_uuids()[0])
        await rig.wait_allocatable(4 * GPUS)
        # To whole GPUs and on: each flips when its last slice is free.
        await node.want("pgpu")
        await node.reach("switching", "pgpu")
        await rig.wait_allocatable(0)
        await node.end(*(pod for pod, index in zip(pods, load, strict=True) if index > 3))
        await rig.wait_allocatable(4)
        await node.end(*list(node.pods))
        await node.applied("pgpu")
    async with mode_node(rig, layouts=LAYOUTS, timeSlicing__rename=True) as node:
        await node.want("sliced")
        await node.applied("sliced")
        await rig.wait_allocatable(4 * GPUS, SHARED)
        await rig.wait_allocatable(0)
        shared = PodSpec("shared", (ContainerSpec("main", {SHARED: 1}),))
        await node.create(shared)
        await rig.wait_phase(shared, Phase.RUNNING)


@asynccontextmanager
async def draining(rig: Rig) -> AsyncIterator[tuple[ModeNode, list[PodSpec]]]:
    """Two GPUs drain on their way from pGPU to vGPU. At the end they get there; their pods have lived on."""
    async with mode_node(rig) as node:
        await serving(node, "pgpu")
        holders = await node.run("pgpu", "holder-0", "holder-1")
        held = [await rig.held_ids(pod, "main") for pod in holders]
        await node.want("vgpu")
        await node.offers("vgpu", 6)
        yield node, holders
        waiting = pod_of("pgpu", "one-more")
        await node.create(waiting)
        await unschedulable(rig, waiting)
        assert [await rig.phase(pod) for pod in holders] == [Phase.RUNNING] * 2
        with anyio.fail_after(20):
            while [await rig.held_ids(pod, "main") for pod in holders] != held:
                await anyio.sleep(0.2)
        await node.end(*holders)
        await node.offers("vgpu")
        await node.applied("vgpu")
        await node.run("vgpu", *(f"new-{number}" for number in range(GPUS)))
        assert await rig.phase(waiting) is Phase.PENDING


async def test_kubelet_restart_in_mid_switch(rig: Rig) -> None:
    async with draining(rig) as (node, _):
        await rig.restart_kubelet(1.0)
        await node.offers("vgpu", 6)
        assert not await rig.allocatable(GPU)
        assert rig.agent_running()


async def test_agent_kill_in_mid_switch(rig: Rig) -> None:
    async with draining(rig) as (node, holders):
        await rig.kill_agent()
        await node.start()
        await node.offers("vgpu", 6)
        told = await node.reach("switching", "vgpu")
        waits = {index for index, gpu in told["gpus"].items() if gpu.get("waitingFor")}
        assert waits == {str(await node.index_of(pod)) for pod in holders}
        # Killed at any moment of a switch, the agent goes on from what the kubelet says.
        for delay, word in ((0.02, "mps"), (0.2, "pgpu"), (0.6, "vgpu")):
            await node.want(word)
            await anyio.sleep(delay)
            await rig.kill_agent()
            await node.start()
        await node.offers("vgpu", 6)


async def test_api_server_outage_in_mid_switch(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await serving(node, "pgpu")
        holders = await node.run("pgpu", "holder-0", "holder-1")
        await node.want("vgpu")
        await node.reach("switching", "vgpu")
        async with rig.api_server_away():
            # It goes on with what was asked for last, serves, and says what it lacks.
            status, text = 0, ""
            with anyio.move_on_after(scaled(20)):
                while status != 200 or "API server" not in text:
                    await anyio.sleep(0.1)
                    status, text = await node.get("/readyz")
            assert (status, "API server" in text) == (200, True), text
            # An agent that starts meanwhile remembers the request.
            await rig.kill_agent()
            await node.start()
            with anyio.fail_after(20):
                while not await node.logged("mode_remembered"):
                    await anyio.sleep(0.1)
            assert (await node.logged("mode_remembered"))[-1]["desired"] == "vgpu"
            with anyio.fail_after(20):
                while (await node.get("/readyz"))[0] != 200:
                    await anyio.sleep(0.1)
        await node.offers("vgpu", 6)
        assert [await rig.phase(pod) for pod in holders] == [Phase.RUNNING] * 2
        await node.end(*holders)
        await node.offers("vgpu")
        await node.applied("vgpu")
        await node.run("vgpu", "after")


async def test_whenbusy_refuse(rig: Rig) -> None:
    async with mode_node(rig, whenBusy="refuse") as node:
        await serving(node, "pgpu")
        (holder,) = await node.run("pgpu", "holder")
        await node.want("vgpu")
        told = await node.reach("blocked", "vgpu")
        # Everybody who may get nodes reads the annotation, so it counts pods; the log names them.
        assert "in use by 1 pod;" in told["message"]
        assert "whenBusy" in told["message"]
        assert any("default/holder" in each["message"] for each in await node.logged("mode_state"))
        # Nothing has changed: the old mode is in force on every GPU and offers on.
        assert (await rig.node()).labels[MODE_LABEL] == "pgpu"
        assert (await rig.node()).labels[LABEL] == "vgpu"
        assert await rig.allocatable() == GPUS
        others = await node.run("pgpu", *(f"other-{number}" for number in range(GPUS - 1)))
        assert "ModeBlocked" in await rig.event_reasons()
        await node.end(holder, *others)
        await node.applied("vgpu")
        await node.offers("vgpu")


async def test_unknown_label_changes_nothing(rig: Rig) -> None:
    async with mode_node(rig, layouts=LAYOUTS) as node:
        await serving(node, "pgpu")
        (pod,) = await node.run("pgpu", "stays")
        for word in ("vgpuu", "pgpu-dra"):
            await node.want(word)
            told = await node.reach("blocked", word)
            await node.condition("False", "Blocked")
            if word == "vgpuu":
                assert "use one of pgpu, vgpu, mps, mig, disable, mixed, sliced" in told["message"]
                assert await rig.allocatable() == GPUS
                # A restart keeps what was in force, too.
                await rig.kill_agent()
                await node.start()
                await node.reach("blocked", word)
                await rig.wait_allocatable(GPUS)
        # Another agent's node: nothing more is offered, and the pod that runs is left alone.
        await rig.wait_allocatable(0)
        assert await rig.phase(pod) is Phase.RUNNING
        await node.want("pgpu")
        await node.applied("pgpu")
        await rig.wait_allocatable(GPUS)


__all__ = [
    "ALL",
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

ALL = (
    test_three_modes_in_turn_on_an_idle_node,
    test_busy_gpus_drain_under_a_backlog,
    test_three_modes_side_by_side,
    test_time_slicing_layout,
    test_kubelet_restart_in_mid_switch,
    test_agent_kill_in_mid_switch,
    test_api_server_outage_in_mid_switch,
    test_no_admission_error_across_thirty_switches,
    test_agent_update_under_a_stream_of_pods,
    test_whenbusy_refuse,
    test_label_flapping,
    test_unknown_label_changes_nothing,
)
