"""The driver's own fence in a container's config.json, where the runtime has put everything together.

Driver and cgroups are made up: the machine is the NVML double's, and NVIDIA's hook for memory limits, which
would refuse to work on it, is passed by. What it would read is looked at.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.injection.toolkit import FILE, LIMITS_HOOK
from agent.vgpu.limits import LIMIT_VARIABLE, REQUEST_VARIABLE
from tests.cluster import manifests, toolkit
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios import vgpu

HOOK = "nvidia-cdi-hook"
SERVING = "615.43.02"
FORGED = {LIMIT_VARIABLE: "999999", REQUEST_VARIABLE: "999999"}


def tools(folder: Path) -> Path:
    """NVIDIA's programs, but for the one hook that takes a real driver."""
    real, made = container_toolkit(), folder / "tools"
    made.mkdir()
    os.link(real / "nvidia-ctk", made / "nvidia-ctk")
    (made / HOOK).write_text(f'#!/bin/sh\n[ "$1" = {LIMITS_HOOK} ] || exec {real / HOOK} "$@"\n')
    (made / HOOK).chmod(0o755)
    return made


def configured(cluster: Cluster, rig: RealRig, name: str) -> Mapping[str, str]:
    """The environment that stands in a container's config.json."""
    limits = {vgpu.CORE: 10, vgpu.MEMORY: 40}
    cluster.apply(manifests.pod(name, manifests.container("main", limits=limits, env=FORGED)))
    try:
        cluster.wait_pod(name)
        status = cluster.get("Pod", name)["status"]["containerStatuses"][0]
        container = status["containerID"].rpartition("/")[2]
        # Unlike rglob, walk passes over folders that go meanwhile, as those of snapshots do.
        found = (Path(folder) for folder, _, files in os.walk(cluster.layout.root) if "config.json" in files)
        (config,) = [folder / "config.json" for folder in found if folder.name == container]
        entries = json.loads(config.read_text())["process"]["env"]
        return dict(entry.split("=", 1) for entry in entries)
    finally:
        cluster.delete("Pod", name, grace_seconds=1)


@pytest.fixture
async def rig(cluster: Cluster) -> AsyncIterator[RealRig]:
    async with real_rig(cluster) as made:
        await anyio.to_thread.run_sync(driver_files, made)
        yield made


def driver_files(rig: RealRig) -> None:
    """The driver's libraries, by the names that both versions give them."""
    toolkit.make_driver_root(rig.folder, rig.driver_version, rig.library)
    for name in ("libcuda.so", "libnvidia-ml.so"):
        file = rig.folder / toolkit.LIBRARIES / f"{name}.{rig.driver_version}"
        file.with_name(f"{name}.{SERVING}").hardlink_to(file)


async def test_driver_fence_is_armed_only_where_known(cluster: Cluster, rig: RealRig) -> None:
    state, cgroups = rig.machine.mapping.state, rig.folder / "cgroup"
    await anyio.Path(cgroups).mkdir()
    settings = {
        "injection.strategy": "auto",
        "injection.toolkit": str(await anyio.to_thread.run_sync(tools, rig.folder)),
        "host.cgroups": str(cgroups),
        "defaultMode": "vgpu",
        "vgpu.enforcement": "library",
        # None is there: what is in a container's configuration comes of the driver's fence alone.
        "vgpu.library": "/nowhere/library.so",
        **await rig.api_access(),
    }
    version = rig.driver_version
    unified = anyio.Path(cgroups / "cgroup.controllers")
    for number, (driver, v2) in enumerate(((SERVING, False), (version, True), (SERVING, True))):
        armed = number == 2
        await (unified.touch() if v2 else unified.unlink(missing_ok=True))
        state.driver_version = driver.encode()
        await rig.start_agent(settings)
        await vgpu.offered(rig, vgpu.GPUS * vgpu.BLOCKS)
        found = await anyio.to_thread.run_sync(partial(configured, cluster, rig, f"fence-{number}"))
        expected = dict(zip(FORGED, ("10240", "0"), strict=True)) if armed else FORGED
        assert {key: found[key] for key in FORGED} == expected, (driver, v2)
        spec = json.loads(await anyio.Path(cluster.cdi_dir / FILE).read_text())
        hooks = [hook["args"][1] for each in spec["devices"] for hook in each["containerEdits"]["hooks"]]
        assert hooks.count(LIMITS_HOOK) == len(rig.gpu_uuids())
        await rig.stop_agent()
