"""The kubelet's checkpoint, read leniently: it is the kubelet's own file and may look different one day."""

import json
from pathlib import Path

import pytest

from agent.kubelet.checkpoint import FILE_NAME, read


def entry(uid: str, container: str, ids: dict[str, list[str]] | None) -> dict[str, object]:
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": "tencent.com/vcuda-core",
        "DeviceIDs": ids,
        "AllocResp": "",
    }


def test_ids_of_all_numa_nodes_are_one_set(tmp_path: Path) -> None:
    entries = [entry("u", "init", {"-1": ["a"], "0": ["b", "c"]}), entry("v", "main", None)]
    document = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {"x/y": ["z"]}}, "Checksum": 7}
    (tmp_path / FILE_NAME).write_text(json.dumps(document))
    assert read(tmp_path) == {
        ("u", "init", "tencent.com/vcuda-core"): frozenset("abc"),
        ("v", "main", "tencent.com/vcuda-core"): frozenset(),
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"Data": {"PodDeviceEntries": [{}]}}'])
def test_a_file_of_another_shape_is_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert read(tmp_path) == {}


def test_an_empty_or_missing_record(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
    (tmp_path / FILE_NAME).write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}}')
    assert read(tmp_path) == {}
