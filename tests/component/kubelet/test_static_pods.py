"""Static pods: files on the node, which the kubelet admits before any API server knows of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import aiohttp
import anyio.to_thread

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from agent.simulator.kubelet.http_api import HttpApi
from tests.component.kubelet.peer import GPU, Plugin, pod_resources
from tests.component.kubelet.steps import EIGHT, held, pod, ready, run
from tests.component.kubelet.waiting import eventually

STATIC = PodSpec("static-simulated-node", (ContainerSpec("main", {GPU: 2}),), static=True)


@asynccontextmanager
async def seen_by_the_api(kubelet: EmbeddedKubelet) -> AsyncIterator[Any]:
    """Asks for all pods, as the agent does."""
    async with HttpApi(kubelet.api).serving() as http, aiohttp.ClientSession() as session:

        async def pods() -> dict[str, Any]:
            async with session.get(f"http://127.0.0.1:{http.port}/api/v1/pods") as answer:
                return {each["metadata"]["name"]: each for each in (await answer.json())["items"]}

        yield pods


async def test_the_mirror_comes_after_admission(kubelet: EmbeddedKubelet, root: Path) -> None:
    during: list[tuple[bool, list[tuple[str, str]]]] = []

    def look() -> None:
        with pod_resources(kubelet.pod_resources_socket) as lister:
            during.append((STATIC.key in kubelet.api.pods, [*lister.held()]))

    async with kubelet.running(), seen_by_the_api(kubelet) as pods:
        plugin = Plugin(root / "plugins_registry/p.sock", devices=EIGHT, before_answer=look)
        with plugin.serving():
            await ready(kubelet)
            await run(kubelet, STATIC)
            # PodResources list it in the middle of its admission, as they list any pod.
            assert during == [(False, [(STATIC.name, "main")])]
            mirror = (await pods())[STATIC.name]
            uid = kubelet.pod(STATIC).uid
            # The checkpoint and the cgroup have the manifest's UID, the API's object has one of its own.
            assert mirror["metadata"]["uid"] != uid
            assert mirror["metadata"]["annotations"]["kubernetes.io/config.hash"] == uid
            assert mirror["metadata"]["annotations"]["kubernetes.io/config.source"] == "file"
            (owner,) = mirror["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"], owner["controller"]) == ("Node", "simulated-node", True)
            await kubelet.delete_pod(STATIC)
            assert await pods() == {}
            await run(kubelet, pod("next", 8))


async def test_the_mirror_comes_beside_the_admission_of_the_next_pod(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    mirrored: list[bool] = []

    def look() -> None:
        give_up = monotonic() + (2.0 if mirrored else 0.0)
        while STATIC.key not in kubelet.api.pods and monotonic() < give_up:
            sleep(0.01)
        mirrored.append(STATIC.key in kubelet.api.pods)

    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT, before_answer=look).serving():
            await ready(kubelet)
            kubelet.create_pod(STATIC)
            await run(kubelet, pod("next"))
    assert mirrored == [False, True]


async def test_one_that_is_refused_is_never_seen_nor_tried_again(
    kubelet: EmbeddedKubelet, root: Path
) -> None:
    async with kubelet.running(), seen_by_the_api(kubelet) as pods:
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving() as plugin:
            await ready(kubelet)
            await run(kubelet, pod("holder", 7))
            await run(kubelet, STATIC, Phase.FAILED)
            await kubelet.delete_pod(pod("holder"))
            await run(kubelet, pod("other", 8))
            assert list(await pods()) == ["other"]
            assert kubelet.pod(STATIC).phase is Phase.FAILED
            assert len(plugin.named("Allocate")) == 2


async def test_a_restarted_kubelet_lists_it_before_all_others(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices=EIGHT).serving():
            await ready(kubelet)
            await run(kubelet, pod("other", 1))
            await run(kubelet, STATIC)
            before = held(kubelet, STATIC)
            await kubelet.stop()
            kubelet.api.reachable = False
            await kubelet.start()
            await eventually(lambda: kubelet.known_devices(GPU) == 8)
            listed = await anyio.to_thread.run_sync(_held, kubelet)
            assert {container: {one for _, one in ids} for container, ids in listed.items()} == {
                (STATIC.name, "main"): before
            }
            kubelet.api.reachable = True
            kubelet.api.changed()
            await eventually(lambda: kubelet.pod(STATIC).phase is Phase.RUNNING)


def _held(kubelet: EmbeddedKubelet) -> dict[tuple[str, str], list[tuple[str, str]]]:
    with pod_resources(kubelet.pod_resources_socket) as lister:
        return lister.held()
