"""The kubelet's record of claims: those with devices of ours, and those that are being prepared."""

import json
from pathlib import Path
from typing import Any

from agent.holdings.claim_checkpoint import FILE_NAME, read
from agent.model.modes import WHOLE_GPUS
from agent.model.resource_claim import DRIVER, device_name

GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"


def written(root: Path, **drivers: dict[str, Any] | None) -> None:
    """A record of claims by their UIDs, each with the state of its drivers."""
    claims = [
        {"ClaimUID": uid, "ClaimName": f"of-{uid}", "Namespace": "ns", "DriverState": each}
        for uid, each in drivers.items()
    ]
    data = json.dumps({"ClaimInfoStateList": claims})
    (root / FILE_NAME).write_text(json.dumps({"Data": data, "Checksum": 0}))


def test_a_claim_that_is_being_prepared_stands_there_without_devices(tmp_path: Path) -> None:
    """Its drivers are named before they are asked, their devices when the last one has answered."""
    ready = {"PoolName": "pool", "DeviceName": device_name(GPU, WHOLE_GPUS), "CDIDeviceIDs": [f"x/y={GPU}"]}
    written(
        tmp_path,
        pending={DRIVER: {"Devices": None}, "nic.example.com": {"Devices": None}},
        ready={DRIVER: {"Devices": [ready]}},
        foreign={"nic.example.com": {"Devices": [{"DeviceName": "eth1"}]}},
        none=None,
    )
    found = read(tmp_path)
    assert found
    assert {uid: len(each.devices) for uid, each in found.items()} == {"pending": 0, "ready": 1}
    assert found["pending"].key == ("ns", "of-pending")
