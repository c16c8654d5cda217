"""Faults of the real kubelet, kept here on purpose: a plugin must bear them."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from tests.component.kubelet.peer import GPU, Call, Plugin, pod_resources
from tests.component.kubelet.steps import EIGHT, held, pod, ready, run
from tests.component.kubelet.waiting import eventually
from tests.pace import scaled


async def test_list_during_an_allocate_after_an_end_makes_held_ids_free_again(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    """Kubernetes PR 137534 (open at 1.36): its table is rebuilt without the IDs of the call under way."""
    ends = PodSpec("ends", (ContainerSpec("main", {GPU: 1}, exits=True, seconds=min(scaled(0.3), 3.0)),))
    under_way: list[set[str]] = []

    def look() -> None:
        if len(plugin.named("Allocate")) == 2:
            while not kubelet.pod(ends).phase.finished:
                ended.wait(0.01)
            with pod_resources(kubelet.pod_resources_socket) as lister:
                assert lister.held()["second", "main"] == []
            under_way.append(set(plugin.named("Allocate")[-1].ids))

    ended = threading.Event()
    async with kubelet.running():
        plugin = Plugin(
            root / "plugins_registry/p.sock",
            devices=EIGHT,
            preferred=lambda call: sorted(call.ids)[: call.size],
            before_answer=look,
        )
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, ends)
            await run(kubelet, pod("second", 2))
            assert under_way == [held(kubelet, pod("second"))]
            await run(kubelet, pod("third", 6))
            offered = set(plugin.named("GetPreferredAllocation")[-1].ids)
            assert offered == set(EIGHT)
            assert held(kubelet, pod("second")) < held(kubelet, pod("third"))
            # The next end that it notices puts its table right.
            await kubelet.delete_pod(pod("third"))
            await run(kubelet, pod("fourth", 6))
            assert not held(kubelet, pod("second")) & held(kubelet, pod("fourth"))


async def test_pod_worker_asks_again_after_a_refusal(kubelet: EmbeddedKubelet, root: Path) -> None:
    """A pod admitted before its resource was known (`GetDeviceRunContainerOptions`, `needsReAllocate`)."""
    early = PodSpec(
        "early",
        (ContainerSpec("main", {GPU: 1}),),
        init_containers=(ContainerSpec("waits", seconds=scaled(2.0)),),
        node_name="preset",
    )
    tries = 0

    def answer(call: Call) -> Mapping[str, Any]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("not now")
        return {"envs": {"HELD": ",".join(call.ids)}}

    async with kubelet.running():
        kubelet.create_pod(early)
        await eventually(lambda: kubelet.pod(early).admitted)
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, answer=answer).serving():
            await ready(kubelet)
            await eventually(lambda: kubelet.pod(early).waiting is not None)
            assert kubelet.pod(early).phase is Phase.PENDING
            reason, message = (kubelet.pod(early).waiting or {})["main"]
            assert reason == "CreateContainerConfigError"
            assert "not now" in message
            await eventually(lambda: kubelet.pod(early).phase is Phase.RUNNING)
            assert len(held(kubelet, early)) == 1
            assert tries == 3


async def test_ids_that_hold_up_a_pod_are_free_the_moment_their_holder_ends(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    """Whatever the plugin thinks: an ID is free when it is healthy and no active pod has it."""
    first = PodSpec("first", (ContainerSpec("main", {GPU: 8}, exits=True, seconds=min(scaled(0.2), 2.0)),))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            kubelet.create_pod(first)
            kubelet.create_pod(pod("second", 8))
            await eventually(lambda: kubelet.pod(first).phase is Phase.RUNNING)
            await anyio.sleep(0.05)
            assert kubelet.pod(pod("second")).reason == "Unschedulable"
            await eventually(lambda: kubelet.pod(pod("second")).phase is Phase.RUNNING)
            assert kubelet.pod(first).phase is Phase.SUCCEEDED
