"""Cordoned GPUs by hand: what the annotation may say, and what the switcher makes of it."""

from functools import partial
from pathlib import Path

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.modes import Mode
from agent.modes.planner import Phase
from agent.modes.withholding import ANNOTATION, Cordon, CordonBook, CordonsUnreadable, dated, decoded, encoded
from tests.unit.modes.nodes import Daemon, gpu, snapshot_of, switching
from tests.unit.node.test_telling import OwnNode

GPUS = {each.uuid: each for each in (gpu(0), gpu(1), gpu(2))}
ZERO, ONE, TWO = GPUS


def test_what_a_person_writes_and_what_the_command_writes() -> None:
    assert decoded("", GPUS) == {}
    assert decoded(" 1 ,, 2= the fan\nis  noisy", GPUS) == {ONE: Cordon(), TWO: Cordon("the fan is noisy")}
    cordons = {ONE: Cordon("fan", "2026-11-22T08:00:00Z"), ZERO: Cordon()}
    assert decoded(encoded(cordons), GPUS) == cordons
    assert decoded('{"0": {}, "1": {"reason": 7, "by": "me"}}', GPUS) == {ZERO: Cordon(), ONE: Cordon()}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "names 7; this node's GPUs: 0 = GPU-00000000, 1 = "),
        ("GPU-nobody=x", "names GPU-nobody"),
        ("{", "is no JSON object of objects"),
        ('{"0": "fan"}', "is no JSON object of objects"),
    ],
)
def test_an_annotation_that_cannot_be_read_is_told(text: str, says: str) -> None:
    with pytest.raises(CordonsUnreadable, match=says):
        decoded(text, GPUS)


def test_a_cordoned_gpu_that_was_replaced_holds_up_no_other_cordon() -> None:
    old = "GPU-11111111-2222-3333-4444-555555555555"
    text = encoded({old: Cordon("broken", "07:00"), ONE: Cordon("fan", "08:00")})
    assert decoded(text, GPUS) == {old: Cordon("broken", "07:00"), ONE: Cordon("fan", "08:00")}
    assert encoded(decoded(text, GPUS)) == text


def test_a_cordon_keeps_the_time_that_it_was_first_seen() -> None:
    first = dated({ONE: Cordon("fan")}, {}, "08:00")
    assert dated({ONE: Cordon("loud fan"), TWO: Cordon()}, first, "09:00") == {
        ONE: Cordon("loud fan", "08:00"),
        TWO: Cordon("", "09:00"),
    }


async def test_a_cordoned_gpu_drains_and_is_not_sold_while_the_mode_is_in_force() -> None:
    daemon = Daemon()
    cordons: Cell[dict[str, Cordon]] = Cell({})
    backends = {Mode.MPS: daemon}
    async with switching(gpu(0), gpu(1), first=Mode.MPS, wings=backends, cordons=cordons) as node:
        await node.reach("mps", "mps")
        node.kubelet.hold("train", "nvidia.com/mps-core", f"{ONE}::sc1")
        cordons.publish({ONE: Cordon("fan", "08:00")})
        await node.reach("mps", "mps-")
        with anyio.fail_after(5):
            await node.switcher.state.wait_for(lambda state: "cordoned" in state.message)
        state = node.switcher.state.value
        assert (state.phase, state.applied) == (Phase.APPLIED, "mps")
        assert state.message == (
            "1 GPU(s) mps, 1 GPU(s) off (cordoned since 08:00: fan); 1 nvidia.com/mps-core held on GPUs that "
            "drain are not on offer but still count as used: pods may stay Pending "
            "though other GPUs have room"
        )
        assert state.gpus[1].waiting_for == ("default/train",)
        assert node.assignment.value.of(ONE).reason == "cordoned since 08:00: fan"
        node.kubelet.end("train")
        await node.reach("mps", "off")
        with anyio.fail_after(5):
            await node.switcher.state.wait_for(lambda state: "Pending" not in state.message)
        assert daemon.up == {ZERO}
        node.want(Mode.PGPU)  # another mode leaves it alone
        await node.reach("pgpu", "off")
        cordons.publish({})
        await node.reach("pgpu", "pgpu")


async def test_a_cordoned_gpu_in_use_holds_up_no_switch_under_refuse() -> None:
    cordons: Cell[dict[str, Cordon]] = Cell({})
    async with switching(gpu(0), gpu(1), first=Mode.PGPU, when_busy="refuse", cordons=cordons) as node:
        await node.reach("pgpu", "pgpu")
        node.kubelet.hold("train", "nvidia.com/gpu", ONE)
        cordons.publish({ONE: Cordon()})
        await node.reach("pgpu", "pgpu-")
        node.want(Mode.VGPU)
        await node.reach("vgpu", "pgpu-")


async def test_the_annotation_has_the_say_and_survives_an_api_server_that_is_away(tmp_path: Path) -> None:
    file, node, inventory = tmp_path / "cordons.json", OwnNode(), Cell(snapshot_of(*GPUS.values()))
    book = CordonBook(file, inventory, node)
    await book.restore()
    async with anyio.create_task_group() as group:
        group.start_soon(book.run)
        with anyio.fail_after(5):
            await book.add(ONE, "fan")
            assert decoded(node.notes[ANNOTATION], GPUS) == book.cell.value
            node.notes[ANNOTATION] = "9"  # a typing error changes nothing
            node.changes.publish(object())
            while book.problem is None:
                await anyio.sleep(0.005)
            assert set(book.cell.value) == {ONE}
            # Nor is it written over by a command: what was meant would be lost.
            for write in (partial(book.add, TWO, "hot"), partial(book.remove, ONE)):
                with pytest.raises(CordonsUnreadable, match="mend or remove it first"):
                    await write()
            assert (node.notes[ANNOTATION], set(book.cell.value)) == ("9", {ONE})
            node.notes[ANNOTATION] = "1,2=hot"
            node.changes.publish(object())
            await book.cell.wait_for(lambda now: set(now) == {ONE, TWO})
            while not await anyio.Path(file).exists() or "hot" not in await anyio.Path(file).read_text():
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    away = OwnNode(known=None)
    restarted = CordonBook(file, inventory, away)
    await restarted.restore()
    assert restarted.cell.value == book.cell.value
    async with anyio.create_task_group() as group:
        group.start_soon(restarted.run)
        await anyio.sleep(0.05)
        assert set(restarted.cell.value) == {ONE, TWO}  # the node is not known yet
        away.known = {}
        away.changes.publish(object())
        with anyio.fail_after(5):
            await restarted.cell.wait_for(lambda now: not now)
        group.cancel_scope.cancel()
