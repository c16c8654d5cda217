"""Instances of others stay, though they come and go between two looks, and though the driver answers late."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from agent.kit.tasks import Backoff
from agent.mig import layouts, mig_mode
from agent.mig.made import NAME
from agent.mig.plugin import MigPlugin
from agent.model.holding import Holding, Record
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.node_inventory import everywhere
from agent.modes.desired import Desired
from agent.modes.wing import NotYet
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import MigProfile, NvmlCode, error_for
from agent.settings import Mig
from tests.pace import scaled
from tests.unit.mig.test_layouts import Rig, asked, problem, running, steady, until


async def so(condition: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.01)


@pytest.mark.parametrize("by", ["agent", "others"])
async def test_what_is_there_after_mig_mode_was_off_is_others(tmp_path: Path, by: str) -> None:
    """The driver gives the same instance the same number and UUID again."""
    rig = Rig(tmp_path)
    rig.machine.set_mig(0, enabled=False)
    rig.scan()
    asked(rig, "3g.71gb")
    gpu = rig.snapshot.value.gpus[0].gpu
    async with running(rig) as wing:
        await wing.prepare(gpu)
        rig.want("3g.71gb")
        await until(rig, {0: "3g.71gb"})
        await so(lambda: wing._book._made)
        if by == "agent":
            rig.assignment.publish(Assignment({}))
            rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
            await wing.give_back(gpu)
        else:
            rig.machine.set_mig(0, enabled=False)
            rig.scan()
        await so(lambda: not wing._book._made)
        rig.machine.set_mig(0, enabled=True)
        rig.machine.make_instance(0, "3g.71gb")
        rig.scan()
        rig.want("7g.141gb")
        await problem(wing, rig.uuid, "have no place beside")
        assert await steady(rig) == {0: "3g.71gb"}


async def test_a_record_that_nobody_keeps_up_is_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
    settings = msgspec.structs.replace(rig.node.settings, mig=Mig(manage=False))
    rig.node = replace(rig.node, settings=settings, calls=WorkerThread("again"))
    rig.calls = rig.node.calls
    async with running(rig):
        assert not (tmp_path / NAME).exists()


async def test_one_that_others_put_there_meanwhile_is_not_destroyed(tmp_path: Path) -> None:
    """Between the look and the destruction ours goes, and theirs has its number."""
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb"})
        rig.scan()

        async def refresh() -> Record:
            rig.node.holdings.refresh = rig._refresh  # type: ignore[method-assign]
            rig.machine.destroy_instance(0, rig.uuid_at(0))
            rig.machine.make_instance(0, "1g.18gb")
            rig.scan()
            return rig.record

        rig.node.holdings.refresh = refresh  # type: ignore[method-assign]
        rig.want("7g.141gb")
        await until(rig, {0: "1g.18gb"})
        assert await steady(rig) == {0: "1g.18gb"}


async def test_the_executor_stops_where_its_gpu_leaves_the_mode(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    make = rig.nvml.make_instance

    def then_leave(*args: Any) -> int:
        number = make(*args)
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(reason="it is closed")}))
        return number

    rig.nvml.make_instance = then_leave  # type: ignore[method-assign, assignment]
    rig.want(*["1g.18gb"] * 7)
    async with running(rig):
        await so(rig.placed)
        assert len(await steady(rig)) == 1


async def test_what_the_driver_makes_late_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "CALL_SECONDS", call := min(scaled(0.2), 1.0))
    rig = Rig(tmp_path)
    make = rig.nvml.make_instance

    def late(*args: Any) -> int:
        rig.nvml.make_instance = make  # type: ignore[method-assign]
        time.sleep(3 * call)
        return make(*args)

    rig.nvml.make_instance = late  # type: ignore[method-assign, assignment]
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "did not answer")
        await until(rig, {0: "3g.71gb"})
        rig.want("7g.141gb")
        await until(rig, {0: "7g.141gb"})


async def test_one_that_was_adopted_and_half_destroyed_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "FIRST_RETRY_SECONDS", 0.05)
    rig = Rig(tmp_path, adopt_foreign=True)
    rig.machine.make_instance(0, "3g.71gb")
    rig.scan()
    rig.machine.fail("nvmlGpuInstanceDestroy", NvmlCode.UNKNOWN, times=1)
    rig.want("7g.141gb")
    async with running(rig):
        await until(rig, {0: "7g.141gb"})


async def test_a_process_of_nobody_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "NOT_BUSY", ("", 0.0, Backoff(0.05, 0.2)))
    monkeypatch.setattr(layouts, "DRAIN_LOOK_SECONDS", 0.02)
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    told: list[str] = []
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        rig.scan()
        number = rig.machine.gpu(0).instances[0].gpu_instance
        rig.machine.processes.start(0, 4711, gpu_instance=number)
        monkeypatch.setattr(layouts.log, "info", lambda event, **_: told.append(event))
        rig.want("7g.141gb")
        await so(lambda: wing._layouts.changes["destroy", "failed"] >= 4)
        assert told.count("mig_plan") <= 2
        rig.machine.processes.stop(4711)
        await until(rig, {0: "7g.141gb"})


async def test_when_busy_is_obeyed_as_it_is_now(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        rig.hold(rig.uuid_at(0))
        rig.node.desired.use(replace(rig.node.desired.catalog, when_busy="refuse"))
        rig.want("1g.18gb")
        await problem(wing, rig.uuid, "whenBusy is refuse")


# MIG mode itself


async def test_mig_mode_that_failed_does_not_come_later(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    gpu = rig.snapshot.value.gpus[1].gpu
    async with running(rig) as wing:
        rig.machine.processes.start(1, 4711)
        with pytest.raises(NotYet):
            await wing.prepare(gpu)
        rig.machine.processes.stop(4711)
        rig.machine.reboot()
        rig.scan()
        assert not rig.snapshot.value.gpus[1].gpu.mig_enabled


@pytest.mark.parametrize("then", ["mig", "pgpu"])
async def test_nobody_gets_a_gpu_while_its_mig_mode_is_being_switched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(mig_mode, "SWITCH_SECONDS", seconds := min(scaled(0.1), 1.0))
    monkeypatch.setattr(mig_mode, "HUNG_LOOK_SECONDS", 0.01)
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    gpu = rig.snapshot.value.gpus[1].gpu
    rig.machine.hang("nvmlDeviceSetMigMode", 1)
    async with running(rig) as wing:
        with anyio.move_on_after(5 * seconds) as scope:
            await wing.prepare(gpu)
        assert scope.cancelled_caught
        if then == "pgpu":
            rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
        ended = anyio.Event()

        async def go_on() -> None:
            await (wing.give_back(gpu) if then == "pgpu" else wing.prepare(gpu))
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(go_on)
            await anyio.sleep(3 * seconds)
            assert not ended.is_set()
            rig.machine.clear_faults()
            with anyio.fail_after(10):
                await ended.wait()
        assert bool(rig.machine.gpu(1).mig_mode) is (then == "mig")


async def test_mig_mode_that_stayed_is_turned_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mig_mode, "AGAIN_SECONDS", 0.1)
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    state = rig.snapshot.value.gpus[1]
    async with running(rig) as wing:
        await wing.prepare(state.gpu)
        rig.machine.make_instance(1, "1g.18gb")
        rig.machine.processes.start(1, 99)
        rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
        rig.node.desired.known.set()
        await wing.give_back(state.gpu)
        rig.assignment.publish(Assignment({state.uuid: GpuMode(reason="in MIG mode")}))
        await anyio.sleep(0.3)
        assert rig.machine.gpu(1).mig_mode
        rig.machine.processes.stop(99)
    # An agent that is started meanwhile does it, too; not while a pod has an instance by the record.
    rig.node = replace(rig.node, calls=WorkerThread("again"))
    rig.calls = rig.node.calls
    rig.machine.set_mig(1, enabled=True)
    rig.scan()
    async with running(rig) as wing:
        assert wing.undoes(rig.snapshot.value.gpus[1])
        await so(lambda: not rig.machine.gpu(1).mig_mode)


async def test_mig_mode_that_was_turned_off_this_moment_is_turned_on_again(tmp_path: Path) -> None:
    """The inventory shows it as it was before: nothing is concluded from that."""
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    scans = True
    rig.node = replace(rig.node, read_again=lambda: rig.scan() if scans else None)
    gpu = rig.snapshot.value.gpus[1].gpu
    async with running(rig) as wing:
        await wing.prepare(gpu)
        scans = False
        rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
        async with anyio.create_task_group() as group:
            group.start_soon(wing.give_back, gpu)
            await so(lambda: not rig.machine.gpu(1).mig_mode)
            asked(rig, "3g.71gb")
            group.start_soon(wing.prepare, gpu)
            await anyio.sleep(0.1)
            scans = True
            rig.scan()
        assert rig.machine.gpu(1).mig_mode


async def test_mig_mode_of_instances_that_a_record_names_stays(tmp_path: Path) -> None:
    """The last request is lost: the switcher takes nobody for a holder."""
    rig = Rig(tmp_path)
    rig.machine.set_mig(0, enabled=False)
    rig.scan()
    asked(rig, "3g.71gb")
    async with running(rig) as wing:
        await wing.prepare(rig.snapshot.value.gpus[0].gpu)
        rig.want("3g.71gb")
        await until(rig, {0: "3g.71gb"})
        rig.hold(rig.uuid_at(0))
        rig.node.desired.known.set()
        rig.node.desired.cell.publish(Desired("pgpu", everywhere(Mode.PGPU)))
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(reason="in MIG mode")}))
        assert await steady(rig) == {0: "3g.71gb"}
        rig.hold()
        rig.assignment.publish(rig.assignment.value)
        await so(lambda: not rig.machine.gpu(0).mig_mode)


async def test_a_gpu_that_left_mig_mode_is_set_up_anew(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked(rig, "3g.71gb")
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        rig.machine.set_mig(0, enabled=False)
        rig.scan()
        assert "has left MIG mode" in wing.obstacle(rig.snapshot.value.gpus[0])
        assert wing.remarks() == ["GPU 0 has left MIG mode, so that nothing of it is offered"]
        rig.assignment.publish(Assignment({rig.uuid: GpuMode(reason="closed")}))
        assert wing.obstacle(rig.snapshot.value.gpus[0]) == ""
        await wing.prepare(rig.snapshot.value.gpus[0].gpu)
        assert rig.snapshot.value.gpus[0].gpu.mig_enabled


async def test_single_goes_from_one_layout_to_another(tmp_path: Path) -> None:
    """A mixture on the way closes no GPU, and what is not of the layout is not offered."""
    rig = Rig(tmp_path, strategy="single")
    rig.machine.set_mig(1, enabled=True)
    rig.machine.make_instance(1, "1g.18gb")
    rig.scan()
    asked(rig, "3g.71gb")
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        rig.scan()
        states = rig.snapshot.value.gpus
        assert [wing.obstacle(state) for state in states] == ["", ""]
        (plugin,) = wing.plugins()
        assert isinstance(plugin, MigPlugin)
        assert [len(plugin._ids(state, GpuMode(Mode.MIG))) for state in states] == [1, 0]


async def test_one_failure_stops_no_other_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    plain = rig.nvml.make_instance

    def make(uuid: str, profile: MigProfile, start: int) -> int:
        if start == 0:
            raise error_for(NvmlCode.UNKNOWN, "nvmlDeviceCreateGpuInstanceWithPlacement")
        return plain(uuid, profile, start)

    monkeypatch.setattr(rig.nvml, "make_instance", make)
    rig.want("3g.71gb", "3g.71gb")
    async with running(rig) as wing:
        await problem(wing, rig.uuid, "3g.71gb at slice 0 cannot be made")
        await until(rig, {4: "3g.71gb"})


async def test_what_nobody_got_in_the_end_is_destroyed_though_no_record_says_anything_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod was refused for another resource. Readings that are all alike are not published."""
    monkeypatch.setattr(layouts, "DRAIN_LOOK_SECONDS", 0.1)
    rig = Rig(tmp_path)
    rig.want("3g.71gb")
    async with running(rig) as wing:
        await until(rig, {0: "3g.71gb"})
        (plugin,) = wing.plugins()
        plugin.refresh()
        rig.node.holdings.look = lambda _: rig._refresh()  # type: ignore[method-assign,assignment,misc]
        await plugin.allocate((rig.uuid_at(0),))
        rig.hand_out(plugin, rig.uuid_at(0))
        rig.want("7g.141gb")
        assert await steady(rig, 0.6) == {0: "3g.71gb"}
        later = time.monotonic() + 3600
        rig.record = Record((), (), began=later, written=later)
        await until(rig, {0: "7g.141gb"})


async def test_a_grant_that_a_reading_shows_meanwhile_is_no_instance_that_nobody_has(tmp_path: Path) -> None:
    """To destroy the other instance takes the driver seconds, and there are readings in between."""
    rig = Rig(tmp_path)
    rig.want("3g.71gb", "3g.71gb")
    async with running(rig):
        await until(rig, {0: "3g.71gb", 4: "3g.71gb"})
        held, granted = rig.uuid_at(4), set[str]()
        rig.node.holdings.grants.append(lambda: frozenset(granted))
        destroy, refresh = rig.nvml.destroy_instance, rig._refresh

        async def before_it_shows() -> Record | None:
            granted.add(held)
            return await refresh()

        def slow(*args: Any) -> None:
            destroy(*args)
            granted.clear()
            rig.record = Record((Holding("ns", "p", "c", "any", (held,)),))
            rig.node.holdings.refresh = refresh  # type: ignore[method-assign]

        rig.node.holdings.refresh = before_it_shows  # type: ignore[method-assign]
        rig.nvml.destroy_instance = slow  # type: ignore[method-assign,assignment]
        rig.want("1g.18gb")
        await until(rig, {0: "1g.18gb", 4: "3g.71gb"})
        assert await steady(rig, 0.6) == {0: "1g.18gb", 4: "3g.71gb"}
