"""The kubelet's checkpoint: it is the kubelet's own file and may look different one day."""

import json
from pathlib import Path

import pytest

from agent.holdings.record import FILE_NAME, Checkpoint, CheckpointUnreadable


def entry(uid: str, container: str, ids: dict[str, list[str]] | None) -> dict[str, object]:
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": "tencent.com/vcuda-core",
        "DeviceIDs": ids,
        "AllocResp": "",
    }


def write(folder: Path, *entries: dict[str, object]) -> None:
    """As the kubelet does: beside it, and then in its place."""
    document = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {"x/y": ["z"]}}, "Checksum": 7}
    (folder / "new").write_text(json.dumps(document))
    (folder / "new").rename(folder / FILE_NAME)


def test_ids_of_all_numa_nodes_are_one_set(tmp_path: Path) -> None:
    write(tmp_path, entry("u", "init", {"-1": ["a"], "0": ["b", "c"]}), entry("v", "main", None))
    assert Checkpoint(tmp_path).read() == {
        ("u", "init", "tencent.com/vcuda-core"): frozenset("abc"),
        ("v", "main", "tencent.com/vcuda-core"): frozenset(),
    }


def test_it_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read() == {}
    write(tmp_path, entry("u", "init", {"-1": ["a"]}))
    first = checkpoint.read()
    assert checkpoint.read() is first
    write(tmp_path, entry("u", "init", {"-1": ["b"]}))
    assert checkpoint.read() == {("u", "init", "tencent.com/vcuda-core"): frozenset("b")}
    (tmp_path / FILE_NAME).unlink()
    assert checkpoint.read() == {}


def test_what_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    kept, ended = entry("u", "main", {"0": ["a"]}), entry("v", "main", {"0": ["b"]})
    write(tmp_path, kept, ended)
    first = checkpoint.read()
    write(tmp_path, kept, entry("w", "main", {"0": ["b"]}))
    second = checkpoint.read()
    resource = "tencent.com/vcuda-core"
    assert second[("u", "main", resource)] is first[("u", "main", resource)]
    assert second.keys() == {("u", "main", resource), ("w", "main", resource)}
    write(tmp_path, ended | {"DeviceIDs": {"0": ["c"]}})
    assert checkpoint.read() == {("v", "main", resource): frozenset("c")}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"Data": {"PodDeviceEntries": [{}]}}', b"\xff\xfe"])
def test_a_file_of_another_shape_is_no_record(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, entry("u", "init", {"-1": ["a"]}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read()
    (tmp_path / FILE_NAME).write_bytes(content)
    for _ in range(2):
        with pytest.raises(CheckpointUnreadable, match=FILE_NAME):
            checkpoint.read()


def test_an_empty_record(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}}')
    assert Checkpoint(tmp_path).read() == {}
