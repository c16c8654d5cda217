"""The GPUs by our own CDI specification: NVIDIA's generator and hooks, and nothing of NVIDIA's on the node.

No hook of the generator is switched off here. Of two there is nothing to see without a driver in the kernel:
disable-device-node-modification changes a file below /proc/driver/nvidia, apply-cuda-memory-limits acts on a
variable that is not set.
"""

import json
import os
import stat
from functools import partial
from pathlib import Path

import anyio

from agent.injection.toolkit import KIND
from tests.cluster import toolkit
from tests.cluster.bare_node import Bare, bare, images, thread
from tests.cluster.build.libc_images import GLIBC_IMAGE, MUSL_IMAGE
from tests.cluster.waiting import NotYet, eventually

__all__ = ["bare", "images"]

HOOKS = {
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
}


async def test_toolkit_generated_cdi_injects(bare: Bare) -> None:
    await bare.start()
    spec = json.loads(bare.specification.read_text())
    assert spec["kind"] == KIND
    assert {device["name"] for device in spec["devices"]} == set(bare.rig.gpu_uuids())
    hook = bare.folder / "state/bin/nvidia-cdi-hook"
    found = {(each["path"], each["args"][1]) for each in spec["containerEdits"]["hooks"]}
    assert found == {(str(hook), name) for name in HOOKS}

    for name, image in (("cdi-glibc", GLIBC_IMAGE), ("cdi-musl", MUSL_IMAGE)):
        await thread(bare.run, name, image)
        nodes = await thread(bare.gpu_of, name)
        assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < nodes
        assert len(nodes) == 3  # and one GPU
        await thread(_libraries_are_there, bare, name)
    cached = await thread(bare.shell, "cdi-glibc", "/sbin/ldconfig -p")
    folder = f"/{toolkit.LIBRARIES}"
    assert f"libcuda.so.1 (libc6,x86-64) => {folder}/libcuda.so.1" in cached
    assert f"{folder}/libnvidia-ml.so.1" in cached
    await thread(bare.shell, "cdi-glibc", "/bin/probe")  # exit code 0, or this fails
    (path,) = (await thread(bare.shell, "cdi-musl", "cat /etc/ld-musl-*.path")).split()[:1]
    assert path == folder
    assert f"libcuda.so.1 => {folder}/libcuda.so.1" in await thread(bare.shell, "cdi-musl", "ldd /bin/probe")


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
    await thread(bare.run, "cdi-plain", GLIBC_IMAGE)
    assert len(await thread(bare.gpu_of, "cdi-plain")) == 3
    await thread(bare.shell, "cdi-plain", "/bin/probe")


async def test_container_restarts_without_the_agent(bare: Bare) -> None:
    """The kubelet repeats the CDI names that it got once: file and hook stay when the agent goes."""
    await bare.start()
    await thread(partial(bare.run, "cdi-again", GLIBC_IMAGE, restart="Always"))
    before = await thread(bare.gpu_of, "cdi-again")
    await bare.rig.stop_agent()
    assert bare.specification.exists()
    await thread(bare.shell, "cdi-again", "kill 1")

    def again() -> None:
        if bare.restarts("cdi-again") < 1:
            raise NotYet("not restarted yet")

    await thread(partial(eventually, again, timeout=60, what="the container was started again"))
    assert await thread(bare.gpu_of, "cdi-again") == before
    await thread(bare.shell, "cdi-again", "/bin/probe")
    # A pod that was taken in before keeps its GPU when the agent returns, to a file that it makes again.
    await bare.start()
    assert await thread(bare.gpu_of, "cdi-again") == before


BESIDE = (
    "nvidia-fs0",
    "nvidia-fs1",
    "gdrdrv",
    "infiniband/rdma_cm",
    "infiniband/uverbs0",
    "nvidia-caps-imex-channels/channel0",
)
COMPANIONS = {
    "injection.gds": True,
    "injection.gdrcopy": True,
    "injection.mofed": True,
    "injection.imexChannels": [0],
}


def _make_companions(root: Path) -> None:
    """Device nodes and files of GDS, GDRCopy, MOFED and IMEX below a driver root."""
    for minor, name in enumerate(BESIDE):
        node = root / "dev" / name
        node.parent.mkdir(exist_ok=True)
        os.mknod(node, mode=stat.S_IFCHR | 0o666, device=os.makedev(toolkit.MAJOR, 200 + minor))
    for file in ("etc/cufile.json", "run/udev/data"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}")


async def test_gds_mofed_gdrcopy_imex_reach_the_container(bare: Bare) -> None:
    """By NVIDIA's generator; a node that lacks one of them offers nothing, and says so."""
    await bare.rig.start_agent({**await bare.settings(), **COMPANIONS})
    with anyio.fail_after(30):
        while "/dev/nvidia-fs*" not in str((await bare.rig.node()).conditions.get("GPUModeReady")):
            await anyio.sleep(0.2)
    assert not await bare.rig.allocatable()
    await bare.rig.stop_agent()

    await thread(_make_companions, bare.folder)
    await bare.start(**COMPANIONS)
    await thread(bare.run, "cdi-beside", GLIBC_IMAGE)
    nodes = (await thread(bare.shell, "cdi-beside", "find /dev -type c")).split()
    assert {f"/dev/{name}" for name in BESIDE} <= set(nodes)
    assert (await thread(bare.shell, "cdi-beside", "cat /etc/cufile.json /run/udev/data")) == "{}{}"
