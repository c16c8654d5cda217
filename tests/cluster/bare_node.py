"""A node with a driver and plain runc, and no toolkit: what the GPU operator's defaults leave."""

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest

from agent.injection.toolkit import FILE
from tests.cluster import manifests, toolkit
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.build.libc_images import build
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet

T = TypeVar("T")
GPU = "nvidia.com/gpu"
TOOLKIT_FILE = "nvidia.json"


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> None:
    """Images with a C library, for what NVIDIA's hooks do."""
    for archive in build(cluster.parts.program("busybox")):
        cluster.import_image(archive)


class Bare:
    """The node, its agent, and the pods of one test."""

    def __init__(self, cluster: Cluster, rig: RealRig, folder: Path) -> None:
        self.cluster = cluster
        self.rig = rig
        self.folder = folder
        self.pods: list[str] = []

    @property
    def specification(self) -> Path:
        """The agent's own, of the GPUs."""
        return self.cluster.cdi_dir / FILE

    async def settings(self) -> dict[str, object]:
        """Of the agent, beside the rig's own."""
        ours = {"injection.strategy": "auto", "injection.toolkit": str(await thread(container_toolkit))}
        return {**ours, **await self.rig.api_access()}

    async def start(self, **settings: object) -> None:
        """Start the agent and wait until all GPUs are on offer as whole ones."""
        await self.rig.start_agent({**await self.settings(), **settings})
        await self.rig.wait_allocatable(len(self.rig.gpu_uuids()))

    def run(self, name: str, image: str, restart: str = "Never") -> None:
        """A pod that holds one GPU, running."""
        container = manifests.container("main", limits={GPU: 1})
        self.pods.append(name)
        self.cluster.apply(manifests.pod(name, {**container, "image": image}, restart_policy=restart))
        self.cluster.wait_pod(name)

    def shell(self, name: str, script: str) -> str:
        """The output of a script in a pod."""
        return self.cluster.exec(name, "main", ["sh", "-c", script])

    def gpu_of(self, name: str) -> set[str]:
        """Its device nodes."""
        return set(self.shell(name, "find /dev -name 'nvidia*' -type c").split())

    def restarts(self, name: str) -> int:
        """How often its container was started again. Raises NotYet while it does not run."""
        status = self.cluster.get("Pod", name)["status"]["containerStatuses"][0]
        if "running" not in status["state"]:
            raise NotYet(json.dumps(status["state"]))
        return int(status["restartCount"])


@pytest.fixture
async def bare(cluster: Cluster, images: None) -> AsyncIterator[Bare]:
    """For one test."""
    async with real_rig(cluster) as rig:
        (cluster.cdi_dir / TOOLKIT_FILE).unlink()
        await thread(toolkit.make_driver_root, rig.folder, rig.driver_version, rig.library)
        made = Bare(cluster, rig, rig.folder)
        try:
            yield made
        finally:
            for name in made.pods:
                await thread(partial(cluster.delete, "Pod", name, grace_seconds=1))


async def thread(call: Callable[..., T], *arguments: Any) -> T:
    """The blocking calls of the rig."""
    return await anyio.to_thread.run_sync(call, *arguments)
