"""The GPUs by our own CDI specification: NVIDIA's generator and hooks, and nothing of NVIDIA's on the node.

No hook of the generator is switched off here. Of two there is nothing to see without a driver in the kernel:
disable-device-node-modification changes a file below /proc/driver/nvidia, apply-cuda-memory-limits acts on a
variable that is not set.
"""

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest

from agent.cdi.specification import FILE, KIND
from tests.cluster import manifests, toolkit
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.build.libc_images import GLIBC_IMAGE, MUSL_IMAGE, build
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

T = TypeVar("T")
GPU = "nvidia.com/gpu"
TOOLKIT_FILE = "nvidia.json"
HOOKS = {
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
}


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> None:
    for archive in build(cluster.parts.program("busybox")):
        cluster.import_image(archive)


class Bare:
    """A node with a driver and plain runc, and no toolkit: what the GPU operator's defaults leave."""

    def __init__(self, cluster: Cluster, rig: RealRig, folder: Path) -> None:
        self.cluster = cluster
        self.rig = rig
        self.folder = folder
        self.pods: list[str] = []

    @property
    def specification(self) -> Path:
        return self.cluster.cdi_dir / FILE

    async def start(self, **settings: object) -> None:
        ours = {"injection.strategy": "auto", "injection.toolkit": str(await _thread(container_toolkit))}
        await self.rig.start_agent({**ours, **await self.rig.api_access(), **settings})
        await self.rig.wait_allocatable(len(self.rig.gpu_uuids()))

    def run(self, name: str, image: str, restart: str = "Never") -> None:
        """A pod that holds one GPU, running."""
        container = manifests.container("main", limits={GPU: 1})
        self.pods.append(name)
        self.cluster.apply(manifests.pod(name, {**container, "image": image}, restart_policy=restart))
        self.cluster.wait_pod(name)

    def shell(self, name: str, script: str) -> str:
        return self.cluster.exec(name, "main", ["sh", "-c", script])

    def gpu_of(self, name: str) -> set[str]:
        return set(self.shell(name, "find /dev -name 'nvidia*' -type c").split())

    def restarts(self, name: str) -> int:
        status = self.cluster.get("Pod", name)["status"]["containerStatuses"][0]
        if "running" not in status["state"]:
            raise NotYet(json.dumps(status["state"]))
        return int(status["restartCount"])


@pytest.fixture
async def bare(cluster: Cluster, images: None) -> AsyncIterator[Bare]:
    async with real_rig(cluster) as rig:
        (cluster.cdi_dir / TOOLKIT_FILE).unlink()
        await _thread(toolkit.make_driver_root, rig.folder, rig.driver_version, rig.library)
        made = Bare(cluster, rig, rig.folder)
        try:
            yield made
        finally:
            for name in made.pods:
                await _thread(partial(cluster.delete, "Pod", name, grace_seconds=1))


async def _thread(call: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(call, *arguments)


async def test_toolkit_generated_cdi_injects(bare: Bare) -> None:
    await bare.start()
    spec = json.loads(bare.specification.read_text())
    assert spec["kind"] == KIND
    assert {device["name"] for device in spec["devices"]} == set(bare.rig.gpu_uuids())
    hook = bare.folder / "state/bin/nvidia-cdi-hook"
    found = {(each["path"], each["args"][1]) for each in spec["containerEdits"]["hooks"]}
    assert found == {(str(hook), name) for name in HOOKS}

    for name, image in (("cdi-glibc", GLIBC_IMAGE), ("cdi-musl", MUSL_IMAGE)):
        await _thread(bare.run, name, image)
        nodes = await _thread(bare.gpu_of, name)
        assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < nodes
        assert len(nodes) == 3  # and one GPU
        await _thread(_libraries_are_there, bare, name)
    cached = await _thread(bare.shell, "cdi-glibc", "/sbin/ldconfig -p")
    folder = f"/{toolkit.LIBRARIES}"
    assert f"libcuda.so.1 (libc6,x86-64) => {folder}/libcuda.so.1" in cached
    assert f"{folder}/libnvidia-ml.so.1" in cached
    await _thread(bare.shell, "cdi-glibc", "/bin/probe")  # exit code 0, or this fails
    (path,) = (await _thread(bare.shell, "cdi-musl", "cat /etc/ld-musl-*.path")).split()[:1]
    assert path == folder
    assert f"libcuda.so.1 => {folder}/libcuda.so.1" in await _thread(bare.shell, "cdi-musl", "ldd /bin/probe")


def _libraries_are_there(bare: Bare, name: str) -> None:
    version = bare.rig.driver_version
    listed = bare.shell(name, f"ls -l /{toolkit.LIBRARIES}")
    for library in ("libcuda.so", "libnvidia-ml.so"):
        assert f"{library}.1 -> {library}.{version}" in listed
    assert "libcuda.so -> libcuda.so.1" in listed
    # As the specification has it, where NVIDIA's runtime would read it a second time.
    assert bare.shell(name, "echo $NVIDIA_VISIBLE_DEVICES").strip() == "void"


async def test_runtime_without_nvidia_gets_gpus(bare: Bare) -> None:
    """Neither runtime nor specification of NVIDIA's: before, pods here got a variable that nobody reads."""
    await bare.start()
    kinds = {json.loads(each.read_text())["kind"] for each in bare.cluster.cdi_dir.glob("*.json")}
    assert KIND in kinds
    assert "nvidia.com/gpu" not in kinds  # beside the agent's own there may be that of its MPS shares
    await _thread(bare.run, "cdi-plain", GLIBC_IMAGE)
    assert len(await _thread(bare.gpu_of, "cdi-plain")) == 3
    await _thread(bare.shell, "cdi-plain", "/bin/probe")


async def test_container_restarts_without_the_agent(bare: Bare) -> None:
    """The kubelet repeats the CDI names that it was told once: file and hook stay when the agent goes."""
    await bare.start()
    await _thread(partial(bare.run, "cdi-again", GLIBC_IMAGE, restart="Always"))
    before = await _thread(bare.gpu_of, "cdi-again")
    await bare.rig.stop_agent()
    assert bare.specification.exists()
    await _thread(bare.shell, "cdi-again", "kill 1")

    def again() -> None:
        if bare.restarts("cdi-again") < 1:
            raise NotYet("not restarted yet")

    await _thread(partial(eventually, again, timeout=60, what="the container was started again"))
    assert await _thread(bare.gpu_of, "cdi-again") == before
    await _thread(bare.shell, "cdi-again", "/bin/probe")
    # A pod that was taken in before keeps its GPU when the agent returns, to a file that it makes again.
    await bare.start()
    assert await _thread(bare.gpu_of, "cdi-again") == before
