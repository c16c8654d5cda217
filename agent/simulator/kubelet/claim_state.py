"""The claims that the kubelet has taken up, and `dra_manager_state`, where they outlive it.

Facts: kubelet 1.37, `pkg/kubelet/cm/dra/claiminfo.go` and `state`. A restarted kubelet knows the devices of a
claim, but takes none for prepared.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent._proto.k8s.io.kubelet.pkg.apis.dra.v1 import Claim, PreparedDevice

FILE_NAME: Final = "dra_manager_state"


@dataclass(slots=True)
class ClaimInfo:
    """A claim: who refers to it, and what each driver answered for it."""

    uid: str
    namespace: str
    name: str
    drivers: dict[str, list[PreparedDevice]]
    pods: set[str] = field(default_factory=set)
    prepared: bool = False
    unpreparing: bool = False

    @property
    def message(self) -> Claim:
        """The claim as plugins get to know it."""
        return Claim(namespace=self.namespace, uid=self.uid, name=self.name)

    @property
    def devices(self) -> Iterator[tuple[str, PreparedDevice]]:
        """Driver and device of all that was prepared."""
        for driver, devices in self.drivers.items():
            for device in devices:
                yield driver, device


Claims = dict[tuple[str, str], ClaimInfo]


def snapshot(claims: Claims) -> str:
    """The content of the file; to be taken on the event loop, where the claims hold still."""
    data = json.dumps(
        {
            "kind": "DRACheckpoint",
            "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
            "ClaimInfoStateList": [_entry(info) for info in claims.values()] or None,
        }
    )
    return json.dumps({"Data": data, "Checksum": zlib.crc32(data.encode())})


def _entry(info: ClaimInfo) -> dict[str, Any]:
    return {
        "ClaimUID": info.uid,
        "ClaimName": info.name,
        "Namespace": info.namespace,
        "PodUIDs": {uid: {} for uid in sorted(info.pods)},
        "DriverState": {
            driver: {"Devices": [_device(each) for each in devices] or None}
            for driver, devices in info.drivers.items()
        },
    }


def _device(device: PreparedDevice) -> dict[str, Any]:
    return {
        "PoolName": device.pool_name,
        "DeviceName": device.device_name,
        "ShareID": device.share_id,
        "RequestNames": device.request_names or None,
        "CDIDeviceIDs": device.cdi_device_ids or None,
    }


def write(root: Path, content: str) -> None:
    """Write the whole file again, mode 0600. Blocks."""
    temporary = root / f".{FILE_NAME}.new"
    temporary.touch(mode=0o600)
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(root / FILE_NAME)


def read(root: Path) -> Claims:
    """The claims of before; none where there is no file. Blocks. Raises ValueError for a broken file."""
    try:
        document = json.loads((root / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if document["Checksum"] != zlib.crc32(document["Data"].encode()):
        raise ValueError(f"{root / FILE_NAME}: the checksum does not fit; remove the file to start again")
    return {
        (each["Namespace"], each["ClaimName"]): ClaimInfo(
            uid=each["ClaimUID"],
            namespace=each["Namespace"],
            name=each["ClaimName"],
            drivers={
                driver: [
                    PreparedDevice(
                        request_names=device["RequestNames"] or [],
                        pool_name=device["PoolName"],
                        device_name=device["DeviceName"],
                        cdi_device_ids=device["CDIDeviceIDs"] or [],
                        share_id=device["ShareID"],
                    )
                    for device in state["Devices"] or ()
                ]
                for driver, state in each["DriverState"].items()
            },
            pods=set(each["PodUIDs"]),
        )
        for each in json.loads(document["Data"])["ClaimInfoStateList"] or ()
    }
