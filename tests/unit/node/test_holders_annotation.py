"""The annotation of holders: amounts by GPU, no names, and it says when it is old."""

import json
from collections.abc import Mapping

import anyio

from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.modes import Assignment, GpuMode, Mode
from agent.node import annotations
from agent.node.annotations import HOLDERS, MOST_HOLDERS, digest, text_of
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.unit.node.test_inventory_annotation import modes
from tests.virtual_time import in_virtual_time

FIRST = "GPU-00000000"


def held(pod: str, cores: int, blocks: int) -> list[Holding]:
    ids = {"vcuda-core": [f"{FIRST}::c{n}" for n in range(cores)]} | {
        "vcuda-memory": [f"{FIRST}::m{n}" for n in range(blocks)]
    }
    return [Holding("secret", pod, "main", f"tencent.com/{name}", tuple(each)) for name, each in ids.items()]


def test_amounts_of_each_gpu_and_no_names() -> None:
    pods = Record((*held("chat", 30, 16), Holding("secret", "train", "x", "y", ("GPU-00000001",))), ())
    found = text_of(
        snapshot_of(gpu(0), gpu(1)),
        modes(GpuMode(Mode.VGPU), GpuMode(Mode.PGPU)),
        pods,
        {("secret", "chat"): "uid-1"},
        "2026-11-23T10:00:00Z",
    )
    assert "secret" not in found
    assert "chat" not in found
    assert json.loads(found) == {
        "v": 1,
        "lost": "2026-11-23T10:00:00Z",
        "gpus": {
            FIRST: {"t": [100, 561, 256], "h": [[digest("uid-1"), 30, 16]]},
            "GPU-00000001": {"t": [1, 0, 0], "h": [["", 1, 0]]},
        },
    }


def test_it_stays_small_whatever_the_number_of_holders() -> None:
    names = [f"p{number}" for number in range(100)]
    pods = Record(
        tuple(Holding("n", name, "c", "r", (f"{FIRST}::c{at}",)) for at, name in enumerate(names)), ()
    )
    uids = {("n", name): name for name in names}
    text = text_of(snapshot_of(gpu(0)), modes(GpuMode(Mode.VGPU)), pods, uids, None)
    found = json.loads(text)["gpus"][FIRST]["h"]
    assert len(found) == MOST_HOLDERS + 1
    assert sum(cores for _, cores, _ in found) == 100
    assert len(text) < 2048


@in_virtual_time
async def test_an_old_record_is_marked_and_bursts_are_one_write() -> None:
    record: Cell[Record | None] = Cell(None)
    snapshot: Cell[Snapshot] = Cell(snapshot_of(gpu(0)))
    assignment: Cell[Assignment] = Cell(modes(GpuMode(Mode.VGPU)))
    notes: Cell[Mapping[str, str]] = Cell({"other": "kept"})
    async with anyio.create_task_group() as group:
        group.start_soon(annotations.follow_holders, snapshot, assignment, record, Cell(None), dict, notes)
        await anyio.sleep(10)
        assert notes.value == {"other": "kept"}
        for cores in range(1, 20):
            record.publish(Record(tuple(held("a", cores, 1)), ()))
            await anyio.sleep(0.01)
        before = notes.version
        await anyio.sleep(10)
        assert json.loads(notes.value[HOLDERS])["gpus"][FIRST]["h"] == [["", 19, 1]]
        assert notes.value["other"] == "kept"
        assert notes.version - before <= 2
        record.publish(None)
        await anyio.sleep(10)
        assert json.loads(notes.value[HOLDERS])["lost"]
        record.publish(Record((), ()))
        await anyio.sleep(10)
        assert json.loads(notes.value[HOLDERS]) == {
            "v": 1,
            "gpus": {FIRST: {"t": [100, 561, 256], "h": []}},
        }
        group.cancel_scope.cancel()
