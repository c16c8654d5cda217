"""`kubelet_internal_checkpoint`: what survives a restart of the kubelet.

The layout is the kubelet's own (`pkg/kubelet/cm/devicemanager/checkpoint`); the checksum is not: the kubelet
hashes Go's in-memory representation, here it is the CRC-32 of the data as written.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent._proto.v1beta1 import ContainerAllocateResponse

from .device_tables import Allocation, PodDevices

FILE_NAME = "kubelet_internal_checkpoint"


def snapshot(pods: PodDevices, healthy: Mapping[str, set[str]]) -> dict[str, Any]:
    """The content of the file; to be taken on the event loop, where the tables hold still."""
    return {
        "PodDeviceEntries": [
            {
                "PodUID": uid,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {str(numa): list(ids) for numa, ids in allocation.by_numa.items()},
                "AllocResp": base64.b64encode(bytes(allocation.response)).decode(),
            }
            for uid, container, resource, allocation in pods.entries()
        ],
        "RegisteredDevices": {resource: sorted(ids) for resource, ids in healthy.items()},
    }


def write(folder: Path, data: Mapping[str, Any]) -> None:
    """Write the whole file again, mode 0600. Blocks."""
    temporary = folder / f".{FILE_NAME}.new"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps({"Data": data, "Checksum": _checksum(data)}), encoding="utf-8")
    temporary.replace(folder / FILE_NAME)


def read(folder: Path) -> tuple[PodDevices, tuple[str, ...]] | None:
    """Held devices and the names of the resources that were registered; None: no file. Blocks.

    Raises ValueError for one that is torn or was tampered with.
    """
    try:
        document: object = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(document, dict) or not document.keys() >= {"Data", "Checksum"}:
        raise ValueError(f"{folder / FILE_NAME} is no checkpoint; remove the file to start again")
    data = document["Data"]
    if document["Checksum"] != _checksum(data):
        raise ValueError(f"{folder / FILE_NAME}: the checksum does not fit; remove the file to start again")
    pods = PodDevices()
    for entry in data["PodDeviceEntries"]:
        allocation = Allocation(
            by_numa={int(numa): tuple(ids) for numa, ids in entry["DeviceIDs"].items()},
            response=ContainerAllocateResponse.parse(base64.b64decode(entry["AllocResp"])),
        )
        pods.insert(entry["PodUID"], entry["ContainerName"], entry["ResourceName"], allocation)
    return pods, tuple(data["RegisteredDevices"])


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
