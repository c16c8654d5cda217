"""How init containers hand their devices on, and what of it PodResources shows."""

from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, Plugin, pod_resources
from tests.component.kubelet.steps import EIGHT, held, pod, ready, run
from tests.component.kubelet.waiting import eventually
from tests.pace import scaled

LADDER = PodSpec(
    "ladder",
    containers=(ContainerSpec("main", {GPU: 3}), ContainerSpec("second", {GPU: 1})),
    init_containers=(ContainerSpec("init", {GPU: 3}), ContainerSpec("sidecar", {GPU: 2}, restartable=True)),
)


async def test_reuse_goes_from_container_to_container(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        plugin = Plugin(
            root / "plugins_registry/p.sock", devices=EIGHT, preferred=lambda call: sorted(call.ids)
        )
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, LADDER)
            init, sidecar = held(kubelet, LADDER, "init"), held(kubelet, LADDER, "sidecar")
            main, second = held(kubelet, LADDER, "main"), held(kubelet, LADDER, "second")
            assert sidecar < init
            assert init - sidecar < main
            assert not main & sidecar
            assert not second & (main | sidecar)
            # The sidecar's need was covered without asking; main's was not.
            asked = plugin.named("GetPreferredAllocation")
            assert [call.size for call in asked] == [3, 3, 1]
            assert set(asked[1].must_include) == init - sidecar
            assert set(asked[1].must_include) < set(asked[1].ids)
            assert len(plugin.named("Allocate")) == 4


async def test_plain_init_containers_are_hidden(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, LADDER)
            table = await anyio.to_thread.run_sync(_held, kubelet)
            shown = {container: len(ids) for (_, container), ids in table.items()}
            assert shown == {"sidecar": 2, "main": 3, "second": 1}


async def test_a_running_init_container_is_hidden_over_a_restart_too(root: Path) -> None:
    """It runs, it holds devices and the pod is Pending; PodResources show nothing but a sidecar's share."""
    spec = PodSpec(
        "compiles",
        containers=(ContainerSpec("main", {GPU: 1}),),
        init_containers=(
            ContainerSpec("sidecar", {GPU: 1}, restartable=True),
            ContainerSpec("compile", {GPU: 3}, seconds=scaled(4.0)),
        ),
    )
    # The plugin is back before the pods are: a container that has not started yet is checked again.
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=replace(FAST, first_pods=scaled(0.8)))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            kubelet.create_pod(spec)
            await eventually(lambda: kubelet.runs(spec, "compile"))
            for restarted in (False, True):
                if restarted:
                    await kubelet.restart()
                    await ready(kubelet)
                    assert await anyio.to_thread.run_sync(_held, kubelet) == {}
                    with anyio.fail_after(10):
                        while not await anyio.to_thread.run_sync(_held, kubelet):
                            await anyio.sleep(0.02)
                table = await anyio.to_thread.run_sync(_held, kubelet)
                # What the app container will have is its own from admission on.
                assert {container: len(ids) for (_, container), ids in table.items()} == {
                    "sidecar": 1,
                    "main": 1,
                }
                assert kubelet.pod(spec).phase is Phase.PENDING
                assert kubelet.runs(spec, "compile")
                assert not kubelet.runs(spec, "main")
            await eventually(lambda: kubelet.pod(spec).phase is Phase.RUNNING)
            assert not kubelet.runs(spec, "compile")
            assert held(kubelet, spec) < held(kubelet, spec, "compile")


async def test_whole_node_in_init_and_again_in_the_app(kubelet: EmbeddedKubelet, root: Path) -> None:
    spec = PodSpec(
        "big",
        containers=(ContainerSpec("main", {GPU: 8}),),
        init_containers=(ContainerSpec("init", {GPU: 8}),),
    )
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, spec)
            assert held(kubelet, spec) == held(kubelet, spec, "init") == set(EIGHT)


async def test_devices_that_only_init_used_stay_with_the_pod(kubelet: EmbeddedKubelet, root: Path) -> None:
    spec = PodSpec(
        "shrinks",
        containers=(ContainerSpec("main", {GPU: 1}),),
        init_containers=(ContainerSpec("init", {GPU: 8}),),
    )
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, spec)
            waiting = pod("other")
            kubelet.create_pod(waiting)
            await anyio.sleep(0.1)
            assert kubelet.pod(waiting).reason == "Unschedulable"  # the scheduler counts the largest step
            await kubelet.delete_pod(spec)
            await kubelet.delete_pod(waiting)
            await run(kubelet, pod("next", 8))


def test_scheduler_counts_sidecars_with_what_follows() -> None:
    assert LADDER.request(GPU) == 6
    assert LADDER.request("example.com/other") == 0
    assert LADDER.resources == (GPU,)


def _held(kubelet: EmbeddedKubelet) -> dict[tuple[str, str], list[tuple[str, str]]]:
    with pod_resources(kubelet.pod_resources_socket) as lister:
        return lister.held()
