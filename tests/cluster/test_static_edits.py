"""A static pod whose manifest is edited: this kubelet admits the next one while the old mirror stands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.cluster import manifests
from tests.cluster.build import Parts
from tests.cluster.options import Options
from tests.cluster.real_rig import real_rig
from tests.cluster.rig import Cluster
from tests.scenarios.rig import GPU

GPUS = 8
HASH = "kubernetes.io/config.hash"
EDIT_SECONDS = 60.0  # the first one has two seconds to end
# Ends two seconds after SIGTERM.
SLOWLY = ("sh", "-c", "trap 'sleep 2; exit 0' TERM; while :; do sleep 3600 & wait $!; done")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the kubelet's manifests."""
    return tmp_path_factory.mktemp("manifests")


@pytest.fixture(scope="module")
def cluster(parts: Parts, folder: Path) -> Iterator[Cluster]:
    """A cluster whose kubelet reads manifests each second."""
    files = {"staticPodPath": str(folder), "fileCheckFrequency": "1s"}
    with Cluster(parts, Options(kubelet_config=files)) as running:
        yield running


def write(folder: Path, edited: str) -> None:
    """The manifest of a pod that asks for all GPUs; what `edited` says makes it another one."""
    made = manifests.pod("static", manifests.container("main", SLOWLY, limits={GPU: GPUS}))
    made["metadata"] |= {"namespace": "default", "annotations": {"edited": edited}}
    draft = folder / ".draft"  # the kubelet passes dot files by
    draft.write_text(json.dumps(made))
    draft.rename(folder / "static.json")


async def test_the_edited_one_gets_what_the_last_one_had(cluster: Cluster, folder: Path) -> None:
    pod = PodSpec(f"static-{cluster.node}", (ContainerSpec("main", {GPU: GPUS}),), static=True)

    def mirrors() -> list[Any]:
        """At most one; by a list, since the first one's may go at any moment."""
        api = cluster.api
        found = api.get(api.path("v1", "Pod", "default"))["items"]
        return [each for each in found if each["metadata"]["name"] == pod.name]

    async def runs(but: str) -> str:
        """The hash of the one that runs, when it has another one than `but`."""
        with anyio.fail_after(EDIT_SECONDS):
            while True:
                await anyio.sleep(0.5)
                for found in await anyio.to_thread.run_sync(mirrors):
                    now, phase = found["metadata"]["annotations"][HASH], found["status"]["phase"]
                    assert now == but or phase in (Phase.PENDING, Phase.RUNNING), found["status"]
                    if now != but and phase == Phase.RUNNING:
                        return str(now)

    async with real_rig(cluster) as rig:
        await rig.start_agent({"defaultMode": "pgpu", **await rig.api_access()})
        await rig.wait_allocatable(GPUS)
        await anyio.to_thread.run_sync(write, folder, "no")
        try:
            first = await runs("")
            held = await rig.held_ids(pod, "main")
            assert len(held) == GPUS
            await anyio.to_thread.run_sync(write, folder, "yes")
            await runs(first)
            assert await rig.held_ids(pod, "main") == held
        finally:
            (folder / "static.json").unlink()
            with anyio.fail_after(EDIT_SECONDS):
                while await anyio.to_thread.run_sync(mirrors):
                    await anyio.sleep(0.5)
