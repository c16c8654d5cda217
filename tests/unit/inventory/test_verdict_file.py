"""The verdict file is shared with earlier releases: they wrote it, and read it after a rollback."""

import json
from pathlib import Path

from agent.inventory.verdicts import VERSION, VerdictFile
from agent.model.xids import XidClass

GPU = {
    "uuid": "GPU-a",
    "index": 0,
    "minor": 0,
    "pci_bus_id": "0000:1b:00.0",
    "product": "NVIDIA H200",
    "memory_bytes": 1,
    "compute_capability": [9, 0],
}


def test_the_class_of_a_log_line_keeps_its_key(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("this\n")
    fault = {"kind": "xid", "number": 145, "told": XidClass.RESET.value}
    health = {"state": "unhealthy", "fault": fault, "cause": "Xid 145"}
    document = {"version": VERSION, "boot_id": "this", "gpus": [{"gpu": GPU, "health": health}]}
    file = VerdictFile(tmp_path, boot)
    file.path.write_text(json.dumps(document))
    (record,) = file.load(now=1.0).records
    assert record.health.fault is not None
    assert record.health.fault.xid_class is XidClass.RESET
    file.save((record,), None, None)
    assert json.loads(file.path.read_text())["gpus"][0]["health"]["fault"] == fault
