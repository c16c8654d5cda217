"""The scenarios of fractions on the embedded kubelet, with both faces of its PodResources."""

from collections.abc import Awaitable, Callable

import pytest

from agent.simulator.kubelet.pod_specs import Phase
from tests.component.embedded_rig import FACES, MOSTLY_THE_NEWEST, Face, embedded_rig
from tests.scenarios import vgpu
from tests.scenarios.rig import Rig

# An agent is started for each: on a machine that is busy with other things that alone may take half a minute.
pytestmark = pytest.mark.timeout(180)

Scenario = Callable[[Rig], Awaitable[None]]
# Pods finish in it, or a kubelet takes up those that have.
BOTH_FACES = (vgpu.test_kubelet_restart_under_vgpu_pods, vgpu.test_init_and_app_containers_share_one_gpu)
LONG = (vgpu.test_agent_sigkilled_ten_times_in_a_burst,)


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[Face], Awaitable[None]]:
    @pytest.mark.parametrize("face", FACES if scenario in BOTH_FACES else MOSTLY_THE_NEWEST)
    async def test(face: Face) -> None:
        async with embedded_rig(face) as rig:
            await scenario(rig)

    return pytest.mark.long(test) if scenario in LONG else test


for _scenario in vgpu.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


async def test_pairs_without_an_api_server_are_refused_in_a_sentence() -> None:
    """Nobody can say what else the pod asks for."""
    async with embedded_rig() as rig:
        await rig.start_agent({"defaultMode": "vgpu"})
        await rig.wait_allocatable(vgpu.GPUS * vgpu.CORES, vgpu.CORE)
        pod = vgpu.share_pod("share", 30, 100)
        await rig.create_pod(pod)
        await rig.wait_phase(pod, Phase.FAILED)
        said = await rig.message(pod)
        assert "default/share: nothing is guessed; restore the connection to the API server" in said


async def test_an_api_server_that_is_away_costs_no_running_pod_and_guesses_nothing() -> None:
    async with embedded_rig() as rig:
        await vgpu.serving(rig)
        before = vgpu.share_pod("before", 30, 100)
        await vgpu.running(rig, before)
        rig.http.reachable = False
        pods = [vgpu.share_pod(f"p{n}", 10, 50) for n in range(4)]
        await vgpu.created(rig, pods)
        alive = [pod for pod in pods if await vgpu.settled(rig, pod) is Phase.RUNNING]
        await vgpu.check_pairs(rig, [before, *alive])
        rig.http.reachable = True
        await vgpu.running(rig, vgpu.share_pod("after", 10, 50))


async def test_the_choice_is_written_to_the_pod_and_a_refusal_becomes_an_event() -> None:
    async with embedded_rig() as rig:
        await vgpu.serving(rig)
        lucky, unlucky = vgpu.share_pod("lucky", 10, 10), vgpu.share_pod("unlucky", 150, 10)
        await vgpu.running(rig, lucky)
        await rig.create_pod(unlucky)
        await rig.wait_phase(unlucky, Phase.FAILED)
        gpu = await vgpu.gpu_of(rig, lucky)
        index = str(rig.gpu_uuids().index(gpu))
        written = {"tencent.com/predicate-gpu-idx-0": index, "tencent.com/gpu-assigned": "true"}
        await rig._wait(
            lambda: rig.kubelet.pod(lucky).written == written, 10.0, lambda: "the choice is not written"
        )
        # By looking again and again: events wake nobody.
        await rig._wait(
            lambda: any(
                event["reason"] == "AllocationRefused" and event["involvedObject"]["name"] == "unlucky"
                for event in rig.http.events
            ),
            10.0,
            lambda: "there is no event",
        )


def test_no_scenario_is_forgotten() -> None:
    assert len(vgpu.ALL) == len([name for name in vars(vgpu) if name.startswith("test_")])
