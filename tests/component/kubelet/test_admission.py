"""Which devices pods get, in which order, and what refuses them."""

import random
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, Call, Plugin, pod_resources
from tests.component.kubelet.steps import EIGHT, OTHER, held, pod, ready, run
from tests.component.kubelet.waiting import eventually


async def test_one_container_request_without_a_deadline(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, pod("p", 3))
            (call,) = plugin.named("Allocate")
            assert len(set(call.ids)) == 3
            assert call.remaining is None
            assert held(kubelet, pod("p", 3)) == set(call.ids)
            assert not plugin.named("GetPreferredAllocation")  # the option does not offer it


async def test_preferred_sees_all_free_devices_and_is_obeyed(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        devices = {**EIGHT, "h": False}
        plugin = Plugin(root / "plugins_registry/p.sock", devices=devices, preferred=lambda _: ["c", "d"])
        with plugin.serving():
            await ready(kubelet, 7)
            await run(kubelet, pod("first", 2))
            await run(kubelet, pod("second", 2))
            first, second = plugin.named("GetPreferredAllocation")
            assert (set(first.ids), first.must_include, first.size) == (set("abcdefg"), (), 2)
            assert first.remaining is None
            assert held(kubelet, pod("first")) == {"c", "d"}
            assert set(second.ids) == set("abefg")
            assert not held(kubelet, pod("second")) & {"c", "d", "h"}  # taken ones are cut from the advice


async def test_preferred_is_asked_even_where_all_free_devices_are_needed(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, preferred=lambda call: call.ids)
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, pod("p", 8))
            assert len(plugin.named("GetPreferredAllocation")) == 1


async def test_short_advice_is_filled_up_at_random(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, preferred=lambda _: ["a", "zz"])
        with plugin.serving():
            await ready(kubelet)
            others = set()
            for turn in range(6):
                spec = pod(f"p{turn}", 2)
                await run(kubelet, spec)
                (other,) = held(kubelet, spec) - {"a"}
                others.add(other)
                await kubelet.delete_pod(spec)
            assert len(others) > 1


async def test_preferred_error_fails_the_pod(kubelet: EmbeddedKubelet, root: Path) -> None:
    def refuse(_: Call) -> list[str]:
        raise RuntimeError("no set of GPUs fits")

    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, preferred=refuse).serving():
            await ready(kubelet)
            await run(kubelet, pod("p"), Phase.FAILED)
            failed = kubelet.pod(pod("p"))
            assert failed.reason == "UnexpectedAdmissionError"
            start = "Pod was rejected: Allocate failed due to device plugin GetPreferredAllocation rpc failed"
            assert failed.message.startswith(start)
            assert "no set of GPUs fits" in failed.message
            assert failed.message.endswith(", which is unexpected")


@pytest.mark.parametrize("count", [0, 1])
async def test_allocate_error_or_no_response_fails_the_pod(
    kubelet: EmbeddedKubelet, root: Path, count: int
) -> None:
    def answer(_: Call) -> dict[str, Any]:
        raise RuntimeError("device a is not mine")

    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, answer=answer, count=count)
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, pod("p"), Phase.FAILED)
            failed = kubelet.pod(pod("p"))
            assert failed.reason == "UnexpectedAdmissionError"
            assert ("device a is not mine" if count else "no containers return") in failed.message


async def test_refused_pod_gives_its_devices_back(kubelet: EmbeddedKubelet, root: Path) -> None:
    broken = threading.Event()

    def answer(call: Call) -> dict[str, Any]:
        if broken.is_set():
            raise RuntimeError("not now")
        return {"envs": {"HELD": ",".join(call.ids)}}

    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, answer=answer).serving():
            await ready(kubelet)
            broken.set()
            await run(kubelet, pod("refused", 8), Phase.FAILED)
            broken.clear()
            await run(kubelet, pod("next", 8))
            assert held(kubelet, pod("next")) == set(EIGHT)


async def test_pods_are_admitted_one_by_one_in_order_of_creation(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    seen: list[dict[tuple[str, str], list[tuple[str, str]]]] = []

    def look() -> None:
        with pod_resources(kubelet.pod_resources_socket) as lister:
            seen.append(lister.held())

    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, before_answer=look)
        with plugin.serving():
            await ready(kubelet)
            specs = [pod(name) for name in ("one", "two", "three")]
            for spec in specs:
                kubelet.create_pod(spec)
            await eventually(lambda: all(kubelet.pod(spec).phase is Phase.RUNNING for spec in specs))
    # From inside Allocate: earlier pods with devices, the one being admitted empty, those queued not there.
    order = [(spec.name, "main") for spec in specs]
    for position, table in enumerate(seen):
        assert list(table) == order[: position + 1]
        assert [len(ids) for ids in table.values()] == [1] * position + [0]
    assert len(seen) == 3


async def test_resources_of_a_container_come_in_random_order(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        calls: list[Call] = []
        one = Plugin(root / "plugins_registry/1.sock", GPU, EIGHT, calls=calls)
        two = Plugin(root / "plugins_registry/2.sock", OTHER, dict.fromkeys("ABCDEFGH", True), calls=calls)
        with one.serving(), two.serving():
            await ready(kubelet)
            await ready(kubelet, resource=OTHER)
            for turn in range(8):
                await run(kubelet, PodSpec(f"p{turn}", (ContainerSpec("main", {GPU: 1, OTHER: 1}),)))
        ids = [call.ids[0] for call in calls if call.method == "Allocate"]
        firsts = {pair[0].isupper() for pair in zip(ids[::2], ids[1::2], strict=True)}
        assert firsts == {True, False}


async def test_first_resource_shows_while_the_second_is_allocated(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    seen: list[int] = []

    def look() -> None:
        with pod_resources(kubelet.pod_resources_socket) as lister:
            seen.append(sum(len(ids) for ids in lister.held().values()))

    async with kubelet.running():
        one = Plugin(root / "plugins_registry/1.sock", GPU, EIGHT, before_answer=look)
        two = Plugin(root / "plugins_registry/2.sock", OTHER, {"A": True}, before_answer=look)
        with one.serving(), two.serving():
            await ready(kubelet)
            await ready(kubelet, 1, OTHER)
            await run(kubelet, PodSpec("p", (ContainerSpec("main", {GPU: 1, OTHER: 1}),)))
    assert seen == [0, 1]


async def test_seed_decides_every_choice(root: Path) -> None:
    chosen = []
    for turn in range(2):
        kubelet = EmbeddedKubelet(root / str(turn), status_tick=0.02, timings=FAST, seed=7)
        async with kubelet.running():
            with Plugin(root / f"{turn}/plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
                await ready(kubelet)
                await run(kubelet, pod("p", 3))
                chosen.append((plugin.named("Allocate")[0].ids, kubelet.pod(pod("p")).uid))
    assert chosen[0] == chosen[1]


async def test_ninth_pod_stays_pending_until_one_is_deleted(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("all", 8))
            kubelet.create_pod(pod("ninth"))
            await eventually(lambda: kubelet.pod(pod("ninth")).reason == "Unschedulable")
            waiting = kubelet.pod(pod("ninth"))
            assert waiting.phase is Phase.PENDING
            assert waiting.message == "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            await kubelet.delete_pod(pod("all"))
            await eventually(lambda: kubelet.pod(pod("ninth")).phase is Phase.RUNNING)
            assert waiting.reason == ""


async def test_a_taint_keeps_the_scheduler_off_and_the_kubelet_does_not_mind(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            kubelet.api.taints = [{"key": "a/b", "effect": "NoSchedule"}]
            kubelet.create_pod(pod("waits"))
            await eventually(lambda: "untolerated taint {a/b: }" in kubelet.pod(pod("waits")).message)
            await run(kubelet, pod("bound", node_name="n"))
            kubelet.api.taints = []
            kubelet.api.changed()
            await eventually(lambda: kubelet.pod(pod("waits")).phase is Phase.RUNNING)


async def test_preset_node_name_skips_the_scheduler(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("all", 8))
            await run(kubelet, pod("bound", node_name="n"), Phase.FAILED)
            message = kubelet.pod(pod("bound")).message
            assert "Requested: 1, Available: 0" in message


async def test_preset_pod_on_a_node_without_the_key_runs_without_devices(kubelet: EmbeddedKubelet) -> None:
    async with kubelet.running():
        await run(kubelet, pod("bound", node_name="n"))
        assert kubelet.container(pod("bound"), "main").env == {}


async def test_preset_pod_on_a_dropped_resource_is_out_of_it(kubelet: EmbeddedKubelet) -> None:
    async with kubelet.running():
        await anyio.sleep(0.1)  # past the first status, which starts from zero
        kubelet.api.set_node_status({GPU: 0}, {GPU: 0})
        await run(kubelet, pod("bound", node_name="n"), Phase.FAILED)
        failed = kubelet.pod(pod("bound"))
        assert failed.reason == f"OutOf{GPU}"
        assert (
            f"Node didn't have enough resource: {GPU}, requested: 1, used: 0, capacity: 0" in failed.message
        )


async def test_hanging_allocate_holds_up_every_other_pod(kubelet: EmbeddedKubelet, root: Path) -> None:
    release = threading.Event()
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, before_answer=lambda: wait(release))
        with plugin.serving():
            await ready(kubelet)
            kubelet.create_pod(pod("hangs"))
            await eventually(lambda: bool(plugin.named("Allocate")))
            plain = PodSpec("plain", (ContainerSpec("main"),))
            kubelet.create_pod(plain)
            await anyio.sleep(0.3)
            assert kubelet.pod(plain).phase is Phase.PENDING
            release.set()
            await eventually(lambda: kubelet.pod(plain).phase is Phase.RUNNING)


async def test_device_that_leaves_the_list_under_allocate_crashes_a_real_kubelet(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    release = threading.Event()
    async with kubelet.running():
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, before_answer=lambda: wait(release))
        with plugin.serving():
            await ready(kubelet)
            kubelet.create_pod(pod("p", 8))
            await eventually(lambda: bool(plugin.named("Allocate")))
            plugin.publish({})
            await ready(kubelet, 0)
            release.set()
            await eventually(lambda: bool(kubelet.panics))
            assert "left the list of nvidia.com/gpu" in kubelet.panics[0]
            plugin.publish(EIGHT)
            await ready(kubelet)  # started again, registered again


async def test_many_random_pods_never_share_a_device(kubelet: EmbeddedKubelet, root: Path) -> None:
    rng = random.Random(3)
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            alive: list[PodSpec] = []
            for turn in range(40):
                if alive and rng.random() < 0.5:
                    await kubelet.delete_pod(alive.pop(rng.randrange(len(alive))))
                spec = pod(f"p{turn}", rng.randint(1, 4))
                kubelet.create_pod(spec)
                alive.append(spec)
                await anyio.sleep(0.015)  # List takes 100 calls a second
                taken = await anyio.to_thread.run_sync(_held, kubelet.pod_resources_socket)
                assert len(taken) == len(set(taken))


def _held(socket: Path) -> list[str]:
    with pod_resources(socket) as lister:
        return [one for ids in lister.held().values() for _, one in ids]


def wait(event: threading.Event) -> None:
    event.wait(10)
