"""Limits of vGPU containers on the embedded kubelet: what they are given, and what is left afterwards."""

from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.isolation import layout
from agent.simulator.kubelet.pods import Phase, PodSpec
from agent.status.client import ask
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.scenarios import vgpu

BLOCK = 256 << 20
LIBRARY_FOLDER = "/usr/lib/gpu-node-agent"
PRELOAD = "/etc/ld.so.preload"


async def serving(rig: EmbeddedRig, **settings: object) -> None:
    """The agent offers vGPU and shows containers a library; what is in that file nobody runs here."""
    library = rig.agent_log().parent / "library.so"
    await anyio.to_thread.run_sync(library.write_bytes, b"\x7fELF")
    given = {"vgpu.enforcement": "library", "vgpu.library": str(library), "defaultMode": "vgpu", **settings}
    await rig.start_agent({**given, **await rig.api_access()})
    await vgpu.offered(rig, vgpu.GPUS * vgpu.BLOCKS)


def mounts(rig: EmbeddedRig, pod: PodSpec) -> Mapping[str, str]:
    """What the limits of a container show it: path inside, path on the host."""
    found = rig.kubelet.container(pod, "main").mounts
    return {inside: host for inside, host in found.items() if inside.startswith((LIBRARY_FOLDER, PRELOAD))}


async def limits_of(rig: EmbeddedRig, pod: PodSpec) -> layout.Limits:
    file = Path(mounts(rig, pod)[f"{LIBRARY_FOLDER}/limits"])
    return layout.read_limits(await anyio.to_thread.run_sync(file.read_bytes))[0]


def folders(rig: EmbeddedRig) -> list[Path]:
    return list((rig.agent_log().parent / "run" / "limits").iterdir())


async def until(condition: Callable[[], bool], what: str, deadline: float = 60.0) -> None:
    """Wait for something on the host."""
    with anyio.move_on_after(deadline):
        while not await anyio.to_thread.run_sync(condition):
            await anyio.sleep(0.1)
        return
    raise AssertionError(f"{what} after {deadline:g} s")


@pytest.mark.timeout(180)
async def test_every_share_has_limits_of_its_own_and_leaves_nothing() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pods = [vgpu.share_pod(f"p{n}", 10 + n, 40 + n) for n in range(4)]
        whole = vgpu.share_pod("whole", 100, 0)
        await vgpu.running(rig, *pods)
        await rig.create_pod(PodSpec("whole", (vgpu.share("main", 100, 0),)))
        await rig.wait_phase(whole, Phase.RUNNING)
        assert not mounts(rig, whole)  # nobody else is on its GPU
        for number, pod in enumerate(pods):
            assert len(mounts(rig, pod)) == 4
            limits = await limits_of(rig, pod)
            assert limits.memory_bytes == (40 + number) * BLOCK
            assert limits.cores == 10 + number
            assert limits.gpu == next(
                iter({each.partition("::")[0] for each in await rig.held_ids(pod, "main", vgpu.MEMORY)})
            )
        assert len({mounts(rig, pod)[f"{LIBRARY_FOLDER}/usage"] for pod in pods}) == len(pods)
        assert len(await anyio.to_thread.run_sync(folders, rig)) == len(pods)
        for pod in pods:
            await rig.delete_pod(pod)
        await until(lambda: not folders(rig), "folders of pods that are gone are still there")


@pytest.mark.timeout(180)
async def test_limits_outlive_an_agent_that_is_killed() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pod = vgpu.share_pod("before", 30, 40)
        await vgpu.running(rig, pod)
        before = mounts(rig, pod)
        inodes = [await anyio.Path(host).stat() for host in before.values()]
        await rig.kill_agent()
        await serving(rig)
        await vgpu.running(rig, vgpu.share_pod("after", 30, 40))
        assert [(await anyio.Path(host).stat()).st_ino for host in before.values()] == [
            each.st_ino for each in inodes
        ]
        assert (await limits_of(rig, pod)).memory_bytes == 40 * BLOCK
        await rig.delete_pod(pod)
        await until(lambda: len(folders(rig)) == 1, "the folder of the pod before is still there")


@pytest.mark.timeout(180)
async def test_a_namespace_says_what_holds_for_its_pods() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        rig.http.namespaces["default"] = {"gpu-node-agent.io/enforcement": "report"}
        rig.kubelet.api.changed()
        for number in range(100):
            pod = vgpu.share_pod(f"p{number}", 1, 1)
            await vgpu.running(rig, pod)
            if not mounts(rig, pod):
                break
        else:
            raise AssertionError("the namespace's label was never followed")


@pytest.mark.timeout(180)
async def test_strict_starts_no_share_without_the_library_and_takes_back_its_units() -> None:
    async with embedded_rig() as rig:
        await serving(rig, **{"vgpu.enforcement": "strict", "vgpu.library": "/nowhere/library.so"})
        pod = vgpu.share_pod("share", 30, vgpu.BLOCKS)
        await rig.create_pod(pod)
        await rig.wait_phase(pod, Phase.FAILED)
        assert "cannot be capped: the enforcement library /nowhere/library.so cannot be read" in (
            await rig.message(pod)
        )
        whole = vgpu.share_pod("whole", 100, 0)
        await vgpu.running(rig, whole)


@pytest.mark.timeout(180)
async def test_owners_are_told_which_fences_hold_and_who_is_above_its_cap() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pod = vgpu.share_pod("share", 30, 4)
        await vgpu.running(rig, pod)
        gpu = await vgpu.gpu_of(rig, pod)
        written = f'{{"main":{{"fences":["library","sweep"],"memoryBytes":{4 * BLOCK}}}}}'
        await rig.kubelet.wait_for(
            lambda: rig.kubelet.pod(pod).written.get("gpu-node-agent.io/limits") == written,
            30.0,
            lambda: f"the pod's annotations are {rig.kubelet.pod(pod).written}",
        )
        pid = await rig.container_pid(pod, "main")
        maps = anyio.Path(rig.agent_log().parent / "proc" / str(pid) / "maps")
        await maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/bin/static\n")
        rig.machine.processes.start(rig.gpu_uuids().index(gpu), pid, memory_mib=2 * 4 * 256)
        await rig.kubelet.wait_for(
            lambda: reasons(rig, pod) == {"LimitsApplied", "LimitsNotLoaded", "MemoryCapExceeded"},
            30.0,
            lambda: f"events of the pod: {reasons(rig, pod)}",
        )
        socket = rig.agent_log().parent / "run" / "agent.sock"
        status = await anyio.to_thread.run_sync(ask, socket, "status")
        (holder,) = [
            each
            for one in status["gpus"]
            for each in one["holders"]
            if each["pod"] == "default/share" and vgpu.MEMORY in each["units"]
        ]
        assert holder["limits"] == {
            "memoryBytes": 4 * BLOCK,
            "fences": ["sweep"],
            "injected": False,
            "aboveCap": True,
        }


def reasons(rig: EmbeddedRig, pod: PodSpec) -> set[str]:
    """Of the events about a pod."""
    return {each["reason"] for each in rig.http.events if each["involvedObject"]["name"] == pod.name}
