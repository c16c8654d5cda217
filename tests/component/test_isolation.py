"""Limits of vGPU containers on the embedded kubelet: what they are given, and what is left afterwards."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.model.node_inventory import INVENTORY, decode
from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from agent.vgpu import layout
from agent.web.control import ask
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios import vgpu

BLOCK = 256 << 20
WAIT_SECONDS = 90.0  # for what takes one or two, on a machine that is busy
LIBRARY_FOLDER = "/usr/lib/gpu-node-agent"
PRELOAD = "/etc/ld.so.preload"


async def serving(rig: EmbeddedRig, **settings: object) -> None:
    """The agent offers vGPU and shows containers a library; what is in that file nobody runs here."""
    await started(rig, **settings)
    await vgpu.offered(rig, vgpu.GPUS * vgpu.BLOCKS)


async def started(rig: EmbeddedRig, **settings: object) -> None:
    """The same, whatever it offers."""
    library = rig.agent_log().parent / "library.so"
    await anyio.to_thread.run_sync(library.write_bytes, b"\x7fELF")
    given = {"vgpu.enforcement": "library", "vgpu.library": str(library), "defaultMode": "vgpu", **settings}
    await rig.start_agent({**given, **await rig.api_access()})


def mounts(rig: EmbeddedRig, pod: PodSpec) -> Mapping[str, str]:
    """The files of limits in a container: path inside, path on the host."""
    found = rig.kubelet.container(pod, "main").mounts
    return {inside: host for inside, host in found.items() if inside.startswith((LIBRARY_FOLDER, PRELOAD))}


async def limits_of(rig: EmbeddedRig, pod: PodSpec) -> layout.DeviceLimits:
    file = Path(mounts(rig, pod)[f"{LIBRARY_FOLDER}/limits"])
    return layout.read_limits(await anyio.to_thread.run_sync(file.read_bytes))[0]


def folders(rig: EmbeddedRig) -> list[Path]:
    return list((rig.agent_log().parent / "run" / "limits").iterdir())


async def until(condition: Callable[[], bool], what: str, deadline: float = WAIT_SECONDS) -> None:
    """Wait for something on the host."""
    with anyio.move_on_after(scaled(deadline)):
        while not await anyio.to_thread.run_sync(condition):
            await anyio.sleep(0.1)
        return
    raise AssertionError(f"{what} after {deadline:g} s")


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(400)
async def test_limits_of_before_outlive_a_reboot_with_enforcement_switched_off() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pod = vgpu.share_pod("before", 30, 40)
        await vgpu.running(rig, pod)
        await rig.kill_agent()
        run = rig.agent_log().parent / "run" / "limits"
        await anyio.to_thread.run_sync(shutil.rmtree, run)  # /run lies in memory
        await serving(rig, **{"vgpu.enforcement": "off"})
        assert (await limits_of(rig, pod)).memory_bytes == 40 * BLOCK
        later = vgpu.share_pod("after", 30, 40)
        await vgpu.running(rig, later)
        assert not mounts(rig, later)
        await rig.delete_pod(pod)
        await until(lambda: not folders(rig), "the folder of the pod before is still there")


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(400)
async def test_units_grown_before_are_nobody_elses_with_enforcement_switched_off() -> None:
    async with embedded_rig() as rig:
        await serving(rig, **{"vgpu.resize": True})
        pod = vgpu.share_pod("grows", 30, 200)
        await vgpu.running(rig, pod)
        resize(rig, pod, 500)
        await capped(rig, pod, 500)
        gpu = await vgpu.gpu_of(rig, pod)
        await rig.kill_agent()
        await started(rig, **{"vgpu.enforcement": "off"})
        await rig.wait_allocatable(vgpu.GPUS * vgpu.BLOCKS - 300, vgpu.MEMORY, WAIT_SECONDS)
        await until(lambda: advertised(rig)[gpu] == vgpu.BLOCKS - 300, f"schedulers see {advertised(rig)}")
        await rig.delete_pod(pod)
        await rig.wait_allocatable(vgpu.GPUS * vgpu.BLOCKS, vgpu.MEMORY, WAIT_SECONDS)


@pytest.mark.timeout(400)
async def test_a_strict_namespace_starts_none_without_the_library_where_others_do() -> None:
    async with embedded_rig() as rig:
        await serving(rig, **{"vgpu.library": "/nowhere/library.so"})
        lenient = vgpu.share_pod("lenient", 1, 1)
        await vgpu.running(rig, lenient)
        assert not mounts(rig, lenient)
        rig.http.namespaces["default"] = {"gpu-node-agent.io/enforcement": "strict"}
        rig.kubelet.api.changed()
        for number in range(100):
            pod = vgpu.share_pod(f"p{number}", 1, 1)
            await rig.create_pod(pod)
            if await vgpu.settled(rig, pod) is Phase.FAILED:
                break
        else:
            raise AssertionError("the namespace's label was never followed")
        assert "the enforcement library /nowhere/library.so cannot be read" in await rig.message(pod)


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(400)
async def test_owners_are_told_which_fences_hold_and_who_is_above_its_cap() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pod = vgpu.share_pod("share", 30, 4)
        await vgpu.running(rig, pod)
        gpu = await vgpu.gpu_of(rig, pod)
        written = f'{{"main":{{"fences":["library","sweep"],"memoryBytes":{4 * BLOCK}}}}}'
        await rig._wait(
            lambda: rig.kubelet.pod(pod).written.get("gpu-node-agent.io/limits") == written,
            WAIT_SECONDS,
            lambda: f"the pod's annotations are {rig.kubelet.pod(pod).written}",
        )
        pid = await rig.container_pid(pod, "main")
        maps = anyio.Path(rig.agent_log().parent / "proc" / str(pid) / "maps")
        await maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/bin/static\n")
        rig.machine.processes.start(rig.gpu_uuids().index(gpu), pid, memory_mib=2 * 4 * 256)
        expected = {"LimitsApplied", "LimitsNotLoaded", "MemoryCapExceeded"}
        await until(lambda: reasons(rig, pod) == expected, "not all events of the pod have come")
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
            "admittedBytes": 4 * BLOCK,
            "fences": ["sweep"],
            "injected": False,
            "avoidable": [],
            "aboveCap": True,
            "uncounted": ["memory of processes without the enforcement library"],
        }


def reasons(rig: EmbeddedRig, pod: PodSpec) -> set[str]:
    """Of the events about a pod."""
    return {each["reason"] for each in rig.http.events if each["involvedObject"]["name"] == pod.name}


def resize(rig: EmbeddedRig, pod: PodSpec, blocks: int) -> None:
    """Ask for another size, as an account that the policy allows does."""
    rig.kubelet.pod(pod).written["gpu-node-agent.io/resize"] = f'{{"main": {blocks}}}'
    rig.kubelet.api.changed()


def advertised(rig: EmbeddedRig) -> Mapping[str, int]:
    """Units of memory of each GPU, as schedulers know them."""
    inventory = decode(rig.http.annotations[INVENTORY])
    return {each.uuid: each.blocks for each in inventory.gpus}


async def capped(rig: EmbeddedRig, pod: PodSpec, blocks: int) -> None:
    """Wait until the limit file says so."""
    with anyio.move_on_after(scaled(WAIT_SECONDS)):
        while (await limits_of(rig, pod)).memory_bytes != blocks * BLOCK:
            await anyio.sleep(0.02)
        return
    raise AssertionError(
        f"the cap is {(await limits_of(rig, pod)).memory_bytes // BLOCK} units, not {blocks}"
    )


@pytest.mark.timeout(400)
async def test_resize_of_a_running_pod() -> None:
    """It grows into what is free on its GPU, keeps that over a restart of the agent, and gives it back."""
    async with embedded_rig() as rig:
        await serving(rig, **{"vgpu.resize": True})
        pod = vgpu.share_pod("grows", 30, 200)
        await vgpu.running(rig, pod)
        await until(lambda: "LimitsApplied" in reasons(rig, pod), "no event says which limits hold")
        resize(rig, pod, 500)
        await capped(rig, pod, 500)
        # What it has grown by is nobody else's: the kubelet's list has it no more, nor have schedulers.
        offered = vgpu.GPUS * vgpu.BLOCKS - 300
        await rig.wait_allocatable(offered, vgpu.MEMORY, WAIT_SECONDS)
        gpu = await vgpu.gpu_of(rig, pod)
        await until(lambda: advertised(rig)[gpu] == vgpu.BLOCKS - 300, f"schedulers see {advertised(rig)}")
        fits, does_not = vgpu.share_pod("fits", 10, 61), vgpu.share_pod("elsewhere", 10, 61)
        await vgpu.running(rig, fits)
        await vgpu.running(rig, does_not)
        assert await vgpu.gpu_of(rig, fits) == gpu
        assert await vgpu.gpu_of(rig, does_not) != gpu
        resize(rig, pod, 501)  # one more than there is
        await until(lambda: "ResizeRefused" in reasons(rig, pod), "no event says that the resize is refused")
        assert (await limits_of(rig, pod)).memory_bytes == 500 * BLOCK
        await rig.kill_agent()
        await started(rig, **{"vgpu.resize": True})
        await rig.wait_allocatable(offered, vgpu.MEMORY, WAIT_SECONDS)
        assert (await limits_of(rig, pod)).memory_bytes == 500 * BLOCK
        await rig.delete_pod(fits)
        await capped(rig, pod, 501)  # what it waited for came free
        resize(rig, pod, 100)
        await capped(rig, pod, 100)
        await rig.wait_allocatable(vgpu.GPUS * vgpu.BLOCKS, vgpu.MEMORY, WAIT_SECONDS)
        resize(rig, pod, 300)
        await capped(rig, pod, 300)
        await rig.delete_pod(pod)
        await rig.wait_allocatable(vgpu.GPUS * vgpu.BLOCKS, vgpu.MEMORY, WAIT_SECONDS)
        await until(
            lambda: {"LimitsResized", "ResizeRefused"} <= reasons(rig, pod),
            f"not all events of the pod have come, but {reasons(rig, pod)}",
        )


def cores_seen(rig: EmbeddedRig, gpu: str) -> int:
    """Cores of a GPU that schedulers know to be grown into."""
    return next(each.grown_cores for each in decode(rig.http.annotations[INVENTORY]).gpus if each.uuid == gpu)


async def shared(rig: EmbeddedRig, pod: PodSpec, percent: int) -> None:
    """Wait until the limit file says so."""
    with anyio.move_on_after(scaled(WAIT_SECONDS)):
        while (await limits_of(rig, pod)).share != percent * 100:
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"the share is {(await limits_of(rig, pod)).share / 100} %, not {percent}")


@pytest.mark.timeout(400)
async def test_cores_grow_into_free_ones_and_survive_a_restart() -> None:
    settings = {"vgpu.resize": True, "vgpu.compute": "hard"}
    async with embedded_rig() as rig:
        await serving(rig, **settings)
        pod = vgpu.share_pod("grows", 30, 200)
        await vgpu.running(rig, pod)
        gpu = await vgpu.gpu_of(rig, pod)
        await shared(rig, pod, 30)
        written = rig.kubelet.pod(pod).written
        written["gpu-node-agent.io/resize"] = '{"main": {"cores": 75}}'
        rig.kubelet.api.changed()
        await shared(rig, pod, 75)
        offered = vgpu.GPUS * 100 - 45
        await rig.wait_allocatable(offered, vgpu.CORE, WAIT_SECONDS)
        await until(lambda: cores_seen(rig, gpu) == 45, "schedulers know nothing of it")
        await rig.kill_agent()
        await started(rig, **settings)
        await rig.wait_allocatable(offered, vgpu.CORE, WAIT_SECONDS)
        await shared(rig, pod, 75)
        # No second container is promised what this one has grown by.
        other = vgpu.share_pod("elsewhere", 26, 10)
        await vgpu.running(rig, other)
        assert await vgpu.gpu_of(rig, other) != gpu
        await rig.delete_pod(pod)
        await rig.wait_allocatable(vgpu.GPUS * 100, vgpu.CORE, WAIT_SECONDS)


@pytest.mark.timeout(400)
async def test_without_a_policy_nobody_is_resized() -> None:
    async with embedded_rig() as rig:
        await serving(rig)
        pod, other = vgpu.share_pod("share", 30, 200), vgpu.share_pod("other", 30, 200)
        await vgpu.running(rig, pod)
        resize(rig, pod, 500)
        await vgpu.running(rig, other)
        assert (await limits_of(rig, pod)).memory_bytes == 200 * BLOCK
