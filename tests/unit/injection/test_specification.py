"""The accepted part of a generated specification, and the devices of an older one stay."""

import json
from typing import Any

import pytest

from agent.injection.toolkit import KIND, BadSpecification, Specification, parse


def text(*names: str, **changes: Any) -> bytes:
    devices = [{"name": name, "containerEdits": {"env": [f"IS={name}"]}} for name in names]
    return json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": devices} | changes).encode()


def test_what_nvidia_wrote_passes_through_unchanged() -> None:
    written = text("GPU-a", "GPU-b", containerEdits={"mounts": [{"hostPath": "/x", "containerPath": "/y"}]})
    found = parse(written)
    assert found.names == {"GPU-a", "GPU-b"}
    assert json.loads(found.encoded()) == json.loads(written)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no cdiVersion"),
        (text("GPU-a", cdiVersion=5), "no cdiVersion"),
        (text("GPU-a", kind="nvidia.com/gpu"), "of kind nvidia.com/gpu"),
        (text(), "names no device"),
        (text(devices="all"), "names no device"),
        (text(devices=["GPU-a"]), "without a name or edits"),
        (text(devices=[{"name": "GPU-a"}]), "without a name or edits"),
        (text(devices=[{"name": 0, "containerEdits": {}}]), "without a name or edits"),
    ],
)
def test_others_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(BadSpecification, match=reason):
        parse(content)


def _kept(named: set[str] | None) -> Specification:
    return parse(text("GPU-b")).keeping(parse(text("GPU-a", "GPU-b", "GPU-c")), named)


def test_devices_that_containers_name_stay_after_their_gpu_has_gone() -> None:
    found = _kept({"GPU-a", "GPU-z"})
    assert [device["name"] for device in found.content["devices"]] == ["GPU-b", "GPU-a"]
    assert found.content["devices"][1]["containerEdits"] == {"env": ["IS=GPU-a"]}


def test_all_stay_while_nobody_knows_who_holds_what() -> None:
    assert _kept(None).names == {"GPU-a", "GPU-b", "GPU-c"}


def test_nothing_stays_that_nobody_names() -> None:
    assert _kept(set()).names == {"GPU-b"}
    assert parse(text("GPU-b")).keeping(None, None).names == {"GPU-b"}
