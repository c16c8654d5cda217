"""The driver's own limits: looked up once a container runs, set at a resize, and never believed unseen."""

from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from agent.kubelet.wire import Allocation
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlCode, error_for
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.vgpu.driver import MOST_TRIES, DriverLimits, cgroups_of, is_unified
from agent.vgpu.folders import LIMITS, About, key_of
from agent.vgpu.limits import Enforcement, memory_device
from agent.vgpu.publishing import Publisher
from tests.pace import scaled
from tests.unit.vgpu.made_up import BLOCK, GPU, units
from tests.unit.vgpu.test_room import Node
from tests.unit.vgpu.test_watch import PLACE, Owners, Reporting

UID = "01234567-89ab-cdef-0123-456789abcdef"
KEY = key_of(units())
CAP = 4 * BLOCK


class Nvml(SimulatedNvml):
    """The limits of one GPU by cgroup; the driver's calls can fail."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine)
        self.limits: dict[Path, int] = {}
        self.sets = 0
        self.failing = False

    def memory_limit(self, uuid: str, cgroup: Path) -> int | None:
        assert uuid == GPU
        if self.failing:
            raise error_for(NvmlCode.NO_PERMISSION, "nvmlDeviceGetMemoryLimits")
        return self.limits.get(cgroup)

    def set_memory_limit(self, uuid: str, cgroup: Path, limit_bytes: int) -> None:
        assert uuid == GPU
        self.sets += 1
        self.limits[cgroup] = limit_bytes


class Driven(Reporting, Node):
    """A container that NVIDIA's hook has given to the driver."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.owners = Owners()
        self.reports()
        self.nvml = Nvml(SimulatedMachine.create("dgx-h200", root / "machine"))
        self.thread = WorkerThread("test", deadline=scaled(10.0))
        self.ids: Mapping[str, str] = {}
        self.driver = DriverLimits(
            self.isolation,
            (self.nvml, self.thread),
            root / "cgroup",
            lambda about: [each for each, name in self.ids.items() if name == about.container],
            self.events,
        )

    async def admit(self, driver: bool = True) -> Allocation:
        return await self.isolation.admit(
            About(UID, "default", "a", "main", GPU, units(), CAP, 30, driver=driver)
        )

    def starts(self, number: int, limit: int | None = CAP) -> Path:
        """The container runs, as the n-th of its kind; `limit`: that of its cgroup."""
        container = f"{number:064x}"
        folder = self.root / f"cgroup/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
        leaf = folder / f"cri-containerd-{container}.scope"
        leaf.mkdir(parents=True)
        (folder / f"cri-containerd-{number + 100:064x}.scope").mkdir()  # another container of the pod
        self.ids = {container: "main"}
        if limit is not None:
            self.nvml.limits[leaf] = limit
        return leaf

    @property
    def fences(self) -> list[str]:
        return list((self.publisher.document(PLACE) or {})["fences"])


@pytest.fixture
async def node(tmp_path: Path) -> Driven:
    made = await anyio.to_thread.run_sync(Driven, tmp_path)
    await made.isolation.start()
    return made


async def test_a_limit_that_the_hook_has_set_is_found(node: Driven) -> None:
    assert (await node.admit()).cdi_devices
    assert (await anyio.to_thread.run_sync(node.isolation.folders.limits, KEY)).driver
    assert not await node.driver.look()  # no container has begun
    await anyio.to_thread.run_sync(node.starts, 1)
    assert not await node.driver.look()
    assert node.isolation.containers.value[KEY].limited is True
    assert node.nvml.sets == 0
    assert node.fences == ["driver", "library"]
    assert node.publisher.by_fence() == {"driver": 1, "library": 0, "sweep": 0}


async def test_a_resize_sets_the_driver_s_limit(node: Driven) -> None:
    await node.admit()
    leaf = await anyio.to_thread.run_sync(node.starts, 1)
    await node.driver.look()
    about = node.isolation.containers.value[KEY].about
    await node.isolation.resize(
        KEY, msgspec.structs.replace(about, memory_bytes=9 * BLOCK, grown=units(100, 5))
    )
    await node.driver.look()
    assert node.nvml.limits == {leaf: 9 * BLOCK}
    # The hook gives a container that restarts what it was admitted with.
    leaf = await anyio.to_thread.run_sync(node.starts, 2)
    await node.driver.look()
    assert node.nvml.limits[leaf] == 9 * BLOCK
    assert node.nvml.sets == 2


async def test_the_cgroup_that_the_runtime_makes_below_is_found(node: Driven) -> None:
    """crun puts a container's processes one folder deeper."""
    await node.admit()
    leaf = await anyio.to_thread.run_sync(node.starts, 1, None)
    await anyio.Path(leaf / "container").mkdir()
    node.nvml.limits[leaf / "container"] = 2 * CAP
    await node.driver.look()
    assert node.nvml.limits == {leaf / "container": CAP}


async def test_a_limit_that_is_not_there_is_no_fence(node: Driven) -> None:
    await node.admit()
    await anyio.to_thread.run_sync(node.starts, 1, None)
    for _ in range(2):
        assert not await node.driver.look()
    assert node.fences == ["library"]
    assert node.owners.events == [("a", "DriverLimitMissing", True)]


async def test_nvml_that_fails_is_asked_again_and_reported_once(node: Driven) -> None:
    await node.admit()
    await anyio.to_thread.run_sync(node.starts, 1)
    node.nvml.failing = True
    for _ in range(2):
        assert await node.driver.look()
        assert node.fences == ["library"]
    assert node.owners.events == [("a", "DriverLimitMissing", True)]
    node.nvml.failing = False
    assert not await node.driver.look()
    assert node.fences == ["driver", "library"]


async def test_a_container_that_has_ended_is_not_looked_for_for_ever(node: Driven) -> None:
    await node.admit()
    node.ids = {"f" * 64: "main"}
    assert [await node.driver.look() for _ in range(MOST_TRIES + 2)] == [True] * MOST_TRIES + [False] * 2


async def test_without_the_facts_the_driver_is_not_asked(node: Driven) -> None:
    assert not (await node.admit(driver=False)).cdi_devices
    await anyio.to_thread.run_sync(node.starts, 1)
    assert not await node.driver.look()
    assert node.isolation.containers.value[KEY].limited is None
    assert node.fences == ["library"]


async def test_the_driver_holds_a_container_without_the_library(node: Driven) -> None:
    await node.agent(source="missing").start()
    admission = await node.admit()
    assert admission == Allocation(cdi_devices=(memory_device(4),))
    assert (await anyio.Path(node.isolation.folders.path(KEY, LIMITS)).stat()).st_size
    publisher = Publisher(node.isolation, node.events, node.watch)
    assert (publisher.document(PLACE) or {})["fences"] == ["driver"]
    await node.agent(Enforcement.REPORT).start()
    assert await node.admit() == Allocation()


async def test_runs_on_changes_alone(node: Driven) -> None:
    pods = node.record  # any cell
    async with anyio.create_task_group() as group:
        group.start_soon(node.driver.run, pods)
        await node.admit()
        leaf = await anyio.to_thread.run_sync(node.starts, 1, 1)
        pods.publish(None)
        with anyio.fail_after(20):
            while node.nvml.limits[leaf] != CAP:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


def test_no_folder_of_a_tenant_is_taken_for_its_cgroup(tmp_path: Path) -> None:
    mine, other = "a" * 64, "b" * 64
    leaf = tmp_path / f"kubepods/besteffort/pod{UID}/{mine}"
    (leaf / f"kubepods/pod{UID}/{mine}").mkdir(parents=True)
    (tmp_path / f"kubepods/pod{UID[:-1]}0/{mine}").mkdir(parents=True)
    (tmp_path / f"kubepods/besteffort/pod{UID}/{other}").mkdir()
    (tmp_path / "kubepods/link").symlink_to(leaf)
    assert cgroups_of(tmp_path, UID, {mine}) == [leaf, leaf / "kubepods"]
    for number in range(40):
        (leaf / f"x{number}").mkdir()
    assert len(cgroups_of(tmp_path, UID, {mine})) == 16
    assert cgroups_of(tmp_path / "nowhere", UID, {mine}) == []


def test_only_the_root_of_v2_counts(tmp_path: Path) -> None:
    assert not is_unified(tmp_path)
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").touch()
    assert not is_unified(tmp_path)  # hybrid: pods are in the hierarchies of v1
    (tmp_path / "cgroup.controllers").touch()
    assert is_unified(tmp_path)
