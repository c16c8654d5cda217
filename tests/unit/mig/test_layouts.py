"""The executor of layouts: what is held, foreign or not understood stays; what failed is tried again."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.service import DevicePluginService
from agent.kubelet.wire import Refused, ResourcePlugin
from agent.mig import layouts
from agent.mig.made import NAME, Made, MadeBook
from agent.mig.plugin import resource_of
from agent.mig.wing import MigWing
from agent.model.holding import Holding, Record
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.node_inventory import Entry, everywhere
from agent.modes.desired import Desired
from agent.modes.wing import NotYet, SetUpFailed
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlCode
from agent.settings import HostSettings, Injection, Mig, Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.pace import scaled
from tests.wing_node import wing_node


class Rig:
    """GPU 0 of a machine, its wing, and the kubelet's record as a test says."""

    def __init__(self, folder: Path, *, refuse: bool = False, **mig: Any) -> None:
        self.machine = SimulatedMachine.create("dgx-h200")
        self.machine.set_mig(0, enabled=True)
        self.nvml = SimulatedNvml(self.machine)
        self.nvml.open()
        self.calls = WorkerThread("test")
        self.folder = folder
        self.snapshot = Cell(Snapshot(problem=None))
        self.assignment = Cell(Assignment())
        settings = Settings(
            injection=Injection(strategy="envvar"),
            host=HostSettings(state=str(folder), proc=str(folder)),
            mig=Mig(manage=True, **mig),
            when_busy="refuse" if refuse else "drain",
        )
        self.node = wing_node(
            settings,
            snapshot=self.snapshot,
            assignment=self.assignment,
            nvml=self.nvml,
            calls=self.calls,
            read_again=self.scan,
        )
        self.record = Record((), ())
        self.away = False
        self.readings = 0
        self.node.holdings.refresh = self._refresh  # type: ignore[method-assign]
        self.node.holdings.cell.publish(self.record)
        self.scan()

    @property
    def uuid(self) -> str:
        return self.machine.uuid(0)

    async def _refresh(self) -> Record | None:
        self.readings += 1
        return None if self.away else self.record

    def scan(self) -> None:
        gpus = tuple(GpuState(self.nvml.describe(index)) for index in range(2))
        self.snapshot.publish(Snapshot(problem=None, gpus=gpus, by_uuid={each.uuid: each for each in gpus}))

    def want(self, *profiles: str) -> None:
        self.assignment.publish(Assignment({self.uuid: GpuMode(Mode.MIG, instances=profiles)}))

    def hold(self, *ids: str) -> None:
        held = tuple(Holding("ns", f"pod{n}", "c", "any", (text,)) for n, text in enumerate(ids))
        self.record = Record(held, (), began=anyio.current_time())
        self.node.holdings.cell.publish(self.record)

    def hand_out(self, plugin: ResourcePlugin, instance: str) -> None:
        """The kubelet has just had an instance allocated, and no reading shows it."""
        service = DevicePluginService(plugin, read=lambda: self.record)
        service._touch([[instance]])
        self.node.holdings.grants.append(service.granted_lately)

    def placed(self) -> dict[int, str]:
        instances = self.machine.gpu(0).instances
        return {each.start: each.profile.decode() for each in instances if each.used or each.bare}

    def uuid_at(self, start: int) -> str:
        there = (each for each in self.machine.gpu(0).instances if each.used and each.start == start)
        return next(there).uuid.decode()


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[MigWing]:
    wing = await MigWing.build(rig.node)
    async with anyio.create_task_group() as group:
        for task in wing.tasks():
            group.start_soon(rig.node.supervisor.restarting, task.name, task.run)
        try:
            yield wing
        finally:
            group.cancel_scope.cancel()
            rig.calls.close()


async def until(rig: Rig, expected: dict[int, str]) -> None:
    with anyio.move_on_after(scaled(10)):
        while rig.placed() != expected:
            await anyio.sleep(0.01)
    assert rig.placed() == expected
    # The machine has it before the agent's call has come back; the call after that one finds it scanned.
    await rig.calls.run(lambda: None)


async def steady(rig: Rig, seconds: float = 0.3) -> dict[int, str]:
    """The instances once nothing has happened for a while."""
    before = rig.placed()
    await anyio.sleep(seconds)
    assert rig.placed() == before
    return before


async def problem(wing: MigWing, uuid: str, says: str) -> None:
    with anyio.fail_after(10):
        while says not in (wing.gpu_facts(uuid).get("layout") or {}).get("problem", ""):
            await anyio.sleep(0.01)
    assert any(says in each for each in wing.remarks())


async def test_a_layout_is_made_and_changed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb", "1g.18gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb", 4: "1g.18gb"})
        assert {each.resource for each in wing.plugins()} == {resource_of("1g.18gb"), resource_of("3g.71gb")}
        rig.want("1g.18gb+me", "2g.35gb", "3g.71gb")
        await until(rig, {0: "3g.71gb", 4: "2g.35gb", 6: "1g.18gb+me"})
        with anyio.fail_after(10):
            while {each["made"] for each in wing.gpu_facts(rig.uuid)["instances"]} != {"agent"}:
                await anyio.sleep(0.01)
        # Without a layout instances stay as they are.
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(Mode.MIG)}))
        assert len(await steady(rig)) == 3
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(Mode.PGPU)}))
        assert len(await steady(rig)) == 3


@pytest.mark.parametrize("by", ["record", "process", "grant", "kubelet away"])
async def test_what_somebody_has_is_never_destroyed(tmp_path: Path, by: str) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb", "3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb", 4: "3g.71gb"})
        held = rig.uuid_at(4)
        (plugin,) = wing.plugins()
        plugin.refresh()
        match by:
            case "record":
                rig.hold(held)
            case "process":
                number = next(e.gpu_instance for e in rig.machine.gpu(0).instances if e.start == 4 and e.used)
                rig.machine.processes.start(0, 4711, gpu_instance=number)
            case "grant":
                rig.hand_out(plugin, held)
            case _:
                rig.away = True
        rig.want("1g.18gb")
        expected = {0: "1g.18gb", 4: "3g.71gb"} if by != "kubelet away" else {0: "3g.71gb", 4: "3g.71gb"}
        await until(rig, expected)
        assert await steady(rig, 0.6) == expected
        # It is handed out no more, by the list and by the call.
        assert held in wing._layouts.leaving
        with pytest.raises(Refused, match="no place for it"):
            await plugin.allocate((held,))


async def test_a_record_that_names_a_holder_late_is_believed(tmp_path: Path) -> None:
    """The record at hand knows nobody, the reading before the act does."""
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
        rig.record = Record(
            (Holding("ns", "p", "c", "any", (rig.uuid_at(0),)),), (), began=anyio.current_time()
        )
        rig.want("7g.141gb")
        with anyio.fail_after(10):
            while not rig.readings:
                await anyio.sleep(0.01)
        assert await steady(rig) == {0: "3g.71gb"}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (("1g.5gb",), "has no MIG profile 1g.5gb, it has 1g.18gb"),
        (("7g.141gb", "1g.18gb"), "do not fit together"),
        (("3g.71gb", "3g.71gb"), "did not make: 2g.35gb (GPU instance 1)"),
    ],
)
async def test_what_cannot_be_changes_nothing(tmp_path: Path, wanted: Sequence[str], says: str) -> None:
    rig = Rig(tmp_path)
    rig.machine.make_instance(0, "2g.35gb")
    rig.scan()
    rig.want("2g.35gb", "1g.18gb")
    async with running(rig) as wing:
        await until(rig, {0: "2g.35gb", 2: "1g.18gb"})
        rig.want(*wanted)
        await problem(wing, rig.uuid, says)
        assert await steady(rig) == {0: "2g.35gb", 2: "1g.18gb"}
        assert not wing._layouts.leaving


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("nvmlDeviceGetGpuInstanceProfileInfo", NvmlCode.FUNCTION_NOT_FOUND, "driver of this node lacks it"),
        ("nvmlDeviceGetGpuInstances", NvmlCode.NO_PERMISSION, "mig.manage of the chart"),
        (
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            NvmlCode.INSUFFICIENT_RESOURCES,
            "3g.71gb at slice 0 cannot",
        ),
    ],
)
async def test_a_driver_that_refuses_is_named_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: NvmlCode, says: str
) -> None:
    monkeypatch.setattr(layouts, "FIRST_RETRY_SECONDS", 0.05)
    rig = Rig(tmp_path)
    rig.machine.fail(call, code)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, says)
        assert rig.placed() == {}
        rig.machine.clear_faults()
        await until(rig, {0: "3g.71gb"})
        with anyio.fail_after(10):
            while wing.remarks():
                await anyio.sleep(0.01)


async def test_a_reset_that_no_look_has_seen_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inventory shows no instance before and after: they were made and lost between two looks."""
    monkeypatch.setattr(layouts, "DRAIN_LOOK_SECONDS", 0.1)
    rig = Rig(tmp_path)
    rig.node = replace(rig.node, read_again=lambda: None)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
        rig.machine.reboot()
        rig.scan()
        await until(rig, {0: "3g.71gb"})


async def test_somebody_who_comes_first_keeps_what_he_made(tmp_path: Path) -> None:
    """Between the look and the creation another one makes the same instance at the same place."""
    rig = Rig(tmp_path)
    make = rig.nvml.make_instance

    def made_by_others_first(*args: Any) -> int:
        rig.nvml.make_instance = make  # type: ignore[method-assign]
        rig.machine.make_instance(0, "3g.71gb")
        return make(*args)

    rig.nvml.make_instance = made_by_others_first  # type: ignore[method-assign,assignment]
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        await problem(wing, rig.uuid, "cannot be made")
        rig.scan()
        rig.want("7g.141gb")
        await problem(wing, rig.uuid, "have no place beside")
        assert await steady(rig) == {0: "3g.71gb"}


async def test_an_instance_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "FIRST_RETRY_SECONDS", 0.2)
    rig = Rig(tmp_path)
    for call in ("nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceDestroy"):
        rig.machine.fail(call, NvmlCode.UNKNOWN, times=1)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "cannot be destroyed")
        assert [each.bare for each in rig.machine.gpu(0).instances][:1] == [1]
        rig.scan()
        assert wing.plugins() == ()
        await until(rig, {0: "3g.71gb"})
        with anyio.fail_after(10):
            while not rig.machine.gpu(0).instances[0].used:
                await anyio.sleep(0.01)


async def test_a_killed_agent_knows_what_it_was_making(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    book = MadeBook(tmp_path)
    await book.load()
    partition = rig.nvml.partition(rig.uuid)
    three = next(each for each in partition.profiles if each.name == "3g.71gb")
    await book.note(Made(rig.uuid, three.number, 4))
    rig.nvml.make_instance(rig.uuid, three, 4)
    rig.scan()
    rig.want("2g.35gb")
    async with running(rig):
        await until(rig, {0: "2g.35gb"})


async def test_nothing_drains_where_busy_gpus_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, refuse=True)
    rig.want("3g.71gb", "3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb", 4: "3g.71gb"})
        rig.hold(rig.uuid_at(4))
        rig.want("1g.18gb")
        await problem(wing, rig.uuid, "whenBusy is refuse and 3g.71gb (GPU instance 2) would have to drain")
        assert len(await steady(rig)) == 2
        assert not wing._layouts.leaving
        # What needs nobody to end is done.
        rig.want("3g.71gb", "1g.18gb")
        await until(rig, {0: "1g.18gb", 4: "3g.71gb"})


async def test_a_drain_outlives_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
        held = rig.uuid_at(0)
        rig.hold(held)
        rig.want("1g.18gb")
        await until(rig, {0: "3g.71gb", 4: "1g.18gb"})
        with anyio.fail_after(10):
            while '"leaving": {}' in (text := (tmp_path / NAME).read_text()) or held not in text:
                await anyio.sleep(0.01)
    rig.calls = WorkerThread("again")
    rig.node = replace(rig.node, calls=rig.calls)
    rig.assignment.publish(Assignment())
    rig.node.holdings.cell.publish(rig.record)
    async with running(rig) as wing:
        assert held in wing._layouts.leaving  # before anything is offered
        await anyio.sleep(0.1)
        assert held in wing._layouts.leaving
        # No layout asks for that any more.
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(Mode.MIG)}))
        with anyio.fail_after(10):
            while wing._layouts.leaving:
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "text", ["", "{", '{"boot_id": 1}', '{"boot_id": "%s", "made": [{}]}', "\0" * 5000, '["made"]']
)
async def test_a_record_that_cannot_be_read_makes_all_instances_others(tmp_path: Path, text: str) -> None:
    rig = Rig(tmp_path)
    rig.machine.make_instance(0, "3g.71gb")
    rig.scan()
    (tmp_path / NAME).write_text(text)
    rig.want("7g.141gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "have no place beside")
        assert await steady(rig) == {0: "3g.71gb"}


@pytest.mark.parametrize("changed", ["boot_id", "uuid", "start", "number", "profile", "gpu"])
async def test_a_record_is_believed_only_where_it_fits(tmp_path: Path, changed: str) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
        with anyio.fail_after(10):
            while '"uuid": "MIG-' not in (tmp_path / NAME).read_text():
                await anyio.sleep(0.01)
    document = json.loads((tmp_path / NAME).read_text())
    (entry,) = document["made"]
    if changed == "boot_id":
        document["boot_id"] = "before"
    else:
        entry[changed] = entry[changed] + 1 if isinstance(entry[changed], int) else "another"
    (tmp_path / NAME).write_text(json.dumps(document))
    rig.calls = WorkerThread("again")
    rig.node = replace(rig.node, calls=rig.calls)
    rig.node.holdings.cell.publish(rig.record)
    rig.want("7g.141gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "have no place beside")
        assert await steady(rig) == {0: "3g.71gb"}


async def test_nothing_is_made_that_cannot_be_written_down(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text("a file where the folder should be")
    rig = Rig(state)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "cannot be written down")
        assert rig.placed() == {}


async def test_foreign_ones_are_adopted_by_option_while_nobody_holds_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path, adopt_foreign=True)
    for profile in ("2g.35gb", "1g.18gb"):
        rig.machine.make_instance(0, profile)
    rig.scan()
    rig.hold(rig.uuid_at(2))
    rig.want("3g.71gb", "2g.35gb")
    async with running(rig):
        await until(rig, {0: "2g.35gb", 2: "1g.18gb", 4: "3g.71gb"})
        rig.hold()
        await until(rig, {0: "2g.35gb", 4: "3g.71gb"})


async def test_one_in_the_place_of_another_is_not_handed_out_as_that(tmp_path: Path) -> None:
    """The driver gives it the same UUID, and the old ID lingers on the list of the old profile."""
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        before = rig.uuid_at(0)
        (old,) = wing.plugins()
        old.refresh()
        rig.want("4g.71gb")
        await until(rig, {0: "4g.71gb"})
        assert rig.uuid_at(0) == before
        with pytest.raises(Refused, match="lists it no more"):
            await old.allocate((before,))
        new = next(each for each in wing.plugins() if each.resource == resource_of("4g.71gb"))
        rig.node.holdings.look = lambda _: rig._refresh()  # type: ignore[method-assign,assignment,misc]
        await new.allocate((before,))


def asked(rig: Rig, *profiles: str) -> None:
    rig.node.desired.cell.publish(Desired("parted", (Entry(("rest",), Mode.MIG, instances=profiles),)))


async def test_mig_mode_is_turned_on_where_no_reset_is_needed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    state = rig.snapshot.value.gpus[1]
    async with running(rig) as wing:
        assert "no layout names instances" in wing.obstacle(state)
        asked(rig, "3g.71gb")
        assert wing.obstacle(state) == ""
        rig.machine.processes.start(1, 4711)
        with pytest.raises(NotYet, match="while something uses the GPU"):
            await wing.prepare(state.gpu)
        rig.machine.processes.stop(4711)
        await wing.prepare(state.gpu)
        assert rig.machine.gpu(1).mig_mode
        await wing.prepare(state.gpu)  # again is nothing
        await wing.give_back(state.gpu)  # a layout asks for it still: it was cordoned, say
        assert rig.machine.gpu(1).mig_mode
        rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
        made = rig.machine.make_instance(1, "3g.71gb")  # by others: it keeps the GPU in MIG mode
        await wing.give_back(state.gpu)
        assert rig.machine.gpu(1).mig_mode
        rig.machine.destroy_instance(1, made)
        await wing.give_back(state.gpu)
        assert not rig.machine.gpu(1).mig_mode
        await wing.give_back(rig.snapshot.value.gpus[0].gpu)  # one that others turned on stays so
        assert rig.machine.gpu(0).mig_mode


async def test_mig_mode_that_takes_a_reset_is_refused_by_default(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.gpu(1).mig_needs_reset = 1
    rig.scan()
    asked(rig, "3g.71gb")
    state = rig.snapshot.value.gpus[1]
    async with running(rig) as wing:
        assert "set mig.allowReset: true" in wing.obstacle(state)
        with pytest.raises(SetUpFailed, match="resets it to switch that"):
            await wing.prepare(state.gpu)
        assert not rig.machine.gpu(1).mig_mode
    allowed = Rig(tmp_path / "other", allow_reset=True)
    allowed.machine.gpu(1).mig_needs_reset = 1
    allowed.scan()
    asked(allowed, "3g.71gb")
    async with running(allowed) as wing:
        await wing.prepare(allowed.snapshot.value.gpus[1].gpu)
        assert allowed.machine.gpu(1).mig_mode


async def test_a_gpu_without_mig_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    gpu = replace(rig.snapshot.value.gpus[1].gpu, mig_switch="", product="Tesla T4")
    async with running(rig) as wing:
        assert "GPU 1 (Tesla T4) has no MIG mode" in wing.obstacle(GpuState(gpu))
