"""Layouts, the words of the label, and where requests come from."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
import pytest

from agent.cluster.node import OwnNode
from agent.kit.tasks import Cell
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.node_inventory import Entry, LayoutError, faults_of, resolve
from agent.modes.desired import DesiredSource, ModeCatalog
from agent.node.conditions import label_value, labels_of
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.virtual_time import in_virtual_time

MIXED = (Entry(("0-1",), Mode.PGPU, 4), Entry(("rest",), Mode.MPS))
WORDS = ModeCatalog({"mixed": MIXED}, (Mode.PGPU, Mode.VGPU, Mode.MPS), "none")


def modes(entries: tuple[Entry, ...], *gpus: int) -> list[str]:
    found = resolve(entries, [gpu(index) for index in gpus])
    return [found[gpu(index).uuid].mode.value for index in gpus]


def test_indices_uuids_products_and_rest_name_gpus() -> None:
    assert modes(MIXED, 0, 1, 2) == ["pgpu", "pgpu", "mps"]
    assert modes((Entry((gpu(1).uuid,), Mode.VGPU),), 0, 1) == ["off", "vgpu"]
    assert modes((Entry(("*h200",), Mode.VGPU),), 0, 1) == ["vgpu", "vgpu"]
    assert modes((Entry(("0",), Mode.OFF), Entry(("rest",), Mode.PGPU)), 0, 1) == ["off", "pgpu"]


def test_a_missing_gpu_and_a_gpu_named_twice_are_told() -> None:
    with pytest.raises(LayoutError, match="entry 1 names GPU index 2, 3, 4; this node has 0, 1"):
        resolve((Entry(("1-4",), Mode.PGPU),), [gpu(0), gpu(1)])
    with pytest.raises(LayoutError, match=r"GPU 1 .* is named by entries 1 and 2"):
        resolve((Entry(("0-1",), Mode.PGPU), Entry((gpu(1).uuid,), Mode.VGPU)), [gpu(0), gpu(1)])
    with pytest.raises(LayoutError, match="names Tesla P100, which no GPU of this node is"):
        resolve((Entry(("Tesla P100",), Mode.PGPU),), [gpu(0)])


def test_faults_that_need_no_node() -> None:
    entries = (
        Entry(("0-3",), Mode.PGPU),
        Entry(("3",), Mode.VGPU, replicas=2),
        Entry(("5-4", "rest"), Mode.MPS),
        Entry(("rest",), Mode.MPS),
        Entry((), Mode.OFF),
    )
    assert faults_of(entries) == [
        (1, "replicas are for mode pgpu, not vgpu"),
        (1, "GPU index 3 stands in entry 1 already"),
        (2, "the range 5-4 runs backwards; write 4-5"),
        (3, "rest stands in entry 3 already"),
        (4, "names no GPU; name indices, UUIDs, a product or rest"),
    ]


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({}, "none"),
        ({"nvidia-device-enable": "pgpu"}, "pgpu"),
        ({"nvidia-device-enable": "enable"}, "vgpu"),
        ({"nvidia-device-enable": "disable"}, "none"),
        ({"nvidia-device-enable": "mixed"}, "mixed"),
    ],
)
def test_words_of_the_label(labels: Mapping[str, str], name: str) -> None:
    desired = WORDS.of_labels(labels)
    assert (desired.name, desired.problem) == (name, None)


def test_an_unknown_word_names_the_known_ones() -> None:
    desired = WORDS.of_labels({"nvidia-device-enable": "gpu"})
    assert desired.entries == ()
    assert desired.problem == (
        "label nvidia-device-enable 'gpu' is unknown; use one of pgpu, vgpu, mps, disable, mixed"
    )


@pytest.mark.parametrize("labels", [{"gpu": "on"}, {"nvidia-device-enable": "pgpu-dra"}])
def test_a_node_that_another_agent_claims_sells_nothing(labels: Mapping[str, str]) -> None:
    desired = WORDS.of_labels(labels)
    assert {entry.mode for entry in desired.entries} == {Mode.OFF}
    assert desired.problem is not None
    assert "two agents cannot offer the same GPUs" in desired.problem


def test_modes_that_are_turned_off_cannot_be_asked_for() -> None:
    words = ModeCatalog({"mixed": MIXED}, (Mode.PGPU,), "none")
    assert words.named("mps", "label").problem == "label 'mps' is unknown; use one of pgpu, disable, mixed"
    assert words.named("mixed", "label").problem == "layout mixed uses mps, which the configuration turns off"


class LabelledNode:
    """A node whose labels a test sets."""

    def __init__(self) -> None:
        self.changes: Cell[object] = Cell(None)
        self.now: dict[str, str] | None = None

    def labels(self) -> dict[str, str] | None:
        return self.now

    def label(self, value: str | None) -> None:
        self.now = {"nvidia-device-enable": value} if value else {}
        self.changes.publish(object())


@in_virtual_time
async def test_labels_are_followed_and_flapping_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.modes.desired.SPACING_SECONDS", 0.2)
    node, source = LabelledNode(), DesiredSource(WORDS)
    published: list[str] = []

    async def record() -> None:
        async for desired in source.cell.values():
            published.append(desired.name)  # noqa: PERF401  it never ends, and is read meanwhile

    async with anyio.create_task_group() as group:
        group.start_soon(source.follow_node, cast("OwnNode", node))
        group.start_soon(record)
        await anyio.sleep(0.01)
        assert not source.known.is_set()
        for number in range(300):
            node.label(("pgpu", "vgpu", "mps")[number % 3])
            await anyio.sleep(0.001)
        node.label("vgpu")
        with anyio.fail_after(5):
            await source.cell.wait_for(lambda desired: desired.name == "vgpu")
            await anyio.sleep(0.5)
        assert source.cell.value.name == "vgpu"
        assert len(published) <= 8  # 0.3 s and some at one request each 0.2 s, and the first
        group.cancel_scope.cancel()


async def test_a_mode_file_is_followed(tmp_path: Path) -> None:
    file, source = tmp_path / "mode", DesiredSource(WORDS)
    async with anyio.create_task_group() as group:
        group.start_soon(source.follow_file, file)
        with anyio.fail_after(15):
            await source.known.wait()
            assert source.cell.value.name == "none"
            await anyio.Path(file).write_text("pgpu\n")
            await source.cell.wait_for(lambda desired: desired.name == "pgpu")
            await anyio.Path(file).write_text("nonsense")
            await source.cell.wait_for(lambda desired: desired.problem is not None)
            assert str(file) in (source.cell.value.problem or "")
            await anyio.Path(file).unlink()
            await source.cell.wait_for(lambda desired: desired.name == "none")
            # Whatever takes its place holds nothing up and moves no GPU.
            await anyio.Path(file).mkdir()
            await source.cell.wait_for(lambda desired: desired.name == "?")
            assert (source.cell.value.entries, source.cell.value.problem) == (
                (),
                f"mode file {file} cannot be read: {file} is no regular file",
            )
            await anyio.Path(file).rmdir()
            await anyio.to_thread.run_sync(os.mkfifo, file.with_suffix(".new"))
            await anyio.Path(file.with_suffix(".new")).rename(file)
            await anyio.sleep(0.1)
            await anyio.Path(file).unlink()
            await anyio.Path(file).write_text("mps")
            await source.cell.wait_for(lambda desired: desired.name == "mps")
        group.cancel_scope.cancel()


def test_gpu_labels_give_way_to_gpu_feature_discovery() -> None:
    snapshot = snapshot_of(gpu(0), gpu(1))
    slices = {snapshot.gpus[1].uuid: GpuMode(Mode.PGPU, replicas=4)}
    ours = labels_of(snapshot, Assignment(slices), {})
    assert ours["cuda-major-version"] == "13"
    assert ours["nvidia.com/gpu.product"] == "NVIDIA-H200"
    assert ours["nvidia.com/gpu.count"] == "2"
    assert ours["nvidia.com/gpu.replicas"] == "4"
    assert ours["nvidia.com/gpu.memory"] == "143771"
    assert set(labels_of(snapshot, Assignment(), {"nvidia.com/gfd.timestamp": "1"})) == {
        "cuda-major-version",
        "cuda-minor-version",
    }
    assert label_value("NVIDIA A100-SXM4-40GB (rev. 2)") == "NVIDIA-A100-SXM4-40GB-rev.-2"
