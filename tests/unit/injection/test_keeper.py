"""When the specification of the GPUs is made again, and what stays of it when it cannot be."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.injection import keeper
from agent.injection.keeper import SpecificationKeeper
from agent.injection.toolkit import FILE, Devices, GenerationFailed, Specification, parse
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.model.gpu import Driver, Gpu
from agent.model.health import Health
from agent.model.holding import Holding, Record
from tests.unit.injection.test_specification import text

NOBODY = Record((), ())
DRIVER = Driver("580.95.05", "13.580.95.05", (13, 0))


def gpu(number: int, **changes: Any) -> GpuState:
    made = Gpu(f"GPU-{number}", number, number, f"0000:{number:02x}:00.0", "NVIDIA H200", 2**37, (9, 0))
    return GpuState(replace(made, **changes))


def snapshot(*states: GpuState, **changes: Any) -> Snapshot:
    made = Snapshot(driver=DRIVER, problem=None, gpus=states)
    return replace(made, **changes)


class Machine:
    """The input of the generator."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.failure: Exception | None = None
        self.calls = 0
        self.nodes: tuple[str, ...] = ()

    async def generate(self) -> Specification:
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        if self.failure:
            raise self.failure
        return parse(text(*self.names))

    async def beside(self) -> tuple[str, ...]:
        return self.nodes


class Scene:
    def __init__(self, folder: Path, *numbers: int) -> None:
        self.folder = folder
        self.machine = Machine(*(f"GPU-{number}" for number in numbers))
        self.inventory = Cell(snapshot(*(gpu(number) for number in numbers)))
        self.held: Cell[Record | None] = Cell(NOBODY)
        self.keeper = SpecificationKeeper(folder, self.machine, self.inventory, self.held)

    @property
    def file(self) -> Path:
        return self.folder / FILE

    def written(self) -> set[str]:
        return {device["name"] for device in json.loads(self.file.read_text())["devices"]}

    def holds(self, *uuids: str) -> None:
        self.held.publish(Record((Holding("team", "pod", "main", "nvidia.com/gpu", uuids),), ()))

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(self.keeper.run)
            yield
            group.cancel_scope.cancel()

    async def comes_to(self, *names: str) -> None:
        with anyio.fail_after(30):
            while self.keeper.devices.value.names != set(names) or not self.file.exists():
                await anyio.sleep(0.01)
        assert self.written() == set(names)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "cdi", 0, 1)


async def test_it_is_made_from_nothing(scene: Scene, logs: Any) -> None:
    await scene.keeper.keep()
    assert scene.written() == {"GPU-0", "GPU-1"}
    assert scene.file.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in scene.folder.iterdir()] == [FILE]
    assert scene.keeper.devices.value == Devices(frozenset({"GPU-0", "GPU-1"}))
    assert [(each["event"], each["devices"]) for each in logs] == [("gpu_specification_made", 2)]


async def test_nothing_is_made_twice(scene: Scene) -> None:
    for _ in range(3):
        await scene.keeper.keep()
    assert (scene.machine.calls, scene.keeper.generations) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        snapshot(gpu(0), gpu(1), driver=replace(DRIVER, version="590.1")),
        snapshot(gpu(0), gpu(2)),
        snapshot(gpu(0, mig_enabled=True), gpu(1)),
        snapshot(gpu(0, minor=7), gpu(1)),
        snapshot(gpu(0), replace(gpu(1), health=Health(away=True))),
    ],
    ids=["driver", "uuid", "mig", "minor", "lost"],
)
async def test_what_it_depends_on_makes_it_anew(scene: Scene, change: Snapshot) -> None:
    await scene.keeper.keep()
    scene.inventory.publish(change)
    await scene.keeper.keep()
    assert scene.machine.calls == 2


@pytest.mark.parametrize(
    "change",
    [
        snapshot(gpu(0), gpu(1), generation=9),
        snapshot(gpu(1), gpu(0)),
        snapshot(gpu(0), gpu(1), problem="NVML is closed"),
        snapshot(gpu(0), gpu(1), released_until=100.0),
        snapshot(driver=None),
    ],
    ids=["nothing", "order", "closed", "released", "no driver"],
)
async def test_nothing_else_does(scene: Scene, change: Snapshot) -> None:
    await scene.keeper.keep()
    scene.inventory.publish(change)
    await scene.keeper.keep()
    assert scene.machine.calls == 1
    assert scene.written() == {"GPU-0", "GPU-1"}


async def test_devices_beside_the_gpus_that_come_make_it_anew(scene: Scene) -> None:
    await scene.keeper.keep()
    scene.machine.nodes = ("dev/nvidia-fs0",)
    await scene.keeper.keep()
    await scene.keeper.keep()
    assert scene.machine.calls == 2


async def test_the_file_of_the_agent_before_serves_until_a_new_one_is_made(scene: Scene) -> None:
    await scene.keeper.keep()
    after = SpecificationKeeper(scene.folder, scene.machine, scene.inventory, scene.held)
    await after.take_up()
    assert after.devices.value.names == {"GPU-0", "GPU-1"}
    await after.keep()
    assert scene.machine.calls == 2  # the machine may have been another one meanwhile


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", text("GPU-0", kind="nvidia.com/gpu")])
async def test_a_file_that_is_not_ours_is_not_taken_up(scene: Scene, content: bytes) -> None:
    scene.folder.mkdir()
    scene.file.write_bytes(content)
    await scene.keeper.take_up()
    assert scene.keeper.devices.value == Devices()
    await scene.keeper.keep()
    assert scene.written() == {"GPU-0", "GPU-1"}


async def test_a_failure_leaves_the_file_alone_and_is_told_once(scene: Scene, logs: Any) -> None:
    await scene.keeper.keep()
    scene.machine.failure = GenerationFailed("the driver is away")
    scene.inventory.publish(snapshot(gpu(0)))
    for _ in range(3):
        await scene.keeper.keep()
    assert scene.written() == {"GPU-0", "GPU-1"}
    assert scene.keeper.devices.value == Devices(frozenset({"GPU-0", "GPU-1"}), "the driver is away")
    assert scene.keeper.failures == 3
    assert [each["event"] for each in logs].count("gpu_specification_not_made") == 1


async def test_a_gpu_that_was_taken_out_stays_named_while_a_container_holds_it(scene: Scene) -> None:
    await scene.keeper.keep()
    scene.holds("GPU-1")
    scene.machine.names = ("GPU-0",)
    scene.inventory.publish(snapshot(gpu(0)))
    await scene.keeper.keep()
    assert scene.written() == {"GPU-0", "GPU-1"}
    scene.held.publish(NOBODY)
    scene.inventory.publish(snapshot(gpu(0), driver=replace(DRIVER, version="590.1")))
    await scene.keeper.keep()
    assert scene.written() == {"GPU-0"}


async def test_it_stays_named_while_nobody_knows_who_holds_what(scene: Scene) -> None:
    await scene.keeper.keep()
    scene.held.publish(None)
    scene.machine.names = ("GPU-0",)
    scene.inventory.publish(snapshot(gpu(0)))
    await scene.keeper.keep()
    assert scene.written() == {"GPU-0", "GPU-1"}


async def test_a_gpu_that_the_generator_does_not_see_is_told(scene: Scene) -> None:
    scene.machine.names = ("GPU-0",)
    await scene.keeper.keep()
    assert scene.keeper.devices.value.names == {"GPU-0"}
    assert "lacks GPU-1" in (scene.keeper.devices.value.problem or "")


async def test_a_gpu_in_mig_mode_has_no_device_and_needs_none(scene: Scene) -> None:
    scene.machine.names = ("GPU-0", "MIG-1")
    scene.inventory.publish(snapshot(gpu(0), gpu(1, mig_enabled=True)))
    await scene.keeper.keep()
    assert scene.keeper.devices.value == Devices(frozenset({"GPU-0", "MIG-1"}))


async def test_a_folder_that_cannot_be_written_is_told(scene: Scene) -> None:
    scene.folder.write_text("in the way")
    await scene.keeper.keep()
    assert FILE in (scene.keeper.devices.value.problem or "")
    assert not scene.keeper.devices.value.names


async def test_it_follows_the_machine(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.02)
    async with scene.kept():
        await scene.comes_to("GPU-0", "GPU-1")
        scene.machine.names = ("GPU-0", "GPU-5")
        scene.inventory.publish(snapshot(gpu(0), gpu(5)))
        await scene.comes_to("GPU-0", "GPU-5")
        calls = scene.machine.calls
        await anyio.sleep(0.1)
        assert scene.machine.calls == calls
        scene.file.unlink()
        await scene.comes_to("GPU-0", "GPU-5")


async def test_a_failure_is_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.01)
    scene.machine.failure = GenerationFailed("no")
    async with scene.kept():
        with anyio.fail_after(30):
            while scene.machine.calls < 3:
                await anyio.sleep(0.01)
        assert scene.keeper.devices.value == Devices(problem="no")
        scene.machine.failure = None
        await scene.comes_to("GPU-0", "GPU-1")
        assert scene.keeper.devices.value == Devices(frozenset({"GPU-0", "GPU-1"}))


async def test_while_there_is_no_driver_nobody_is_asked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.001)
    scene.inventory.publish(snapshot(problem="no driver"))
    async with scene.kept():
        await anyio.sleep(0.05)
        assert scene.machine.calls == 0
        scene.inventory.publish(snapshot(gpu(0), gpu(1)))
        await scene.comes_to("GPU-0", "GPU-1")
