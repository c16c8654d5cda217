"""The kubelet's checkpoint of devices: the one record that shows what ended init containers still hold.

Layout: kubelet 1.20 to 1.36, `pkg/kubelet/cm/devicemanager/checkpoint`. It is written when all devices of a
container are allocated, and keeps entries of pods that have gone until it is written again.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

log = structlog.get_logger()

FILE_NAME = "kubelet_internal_checkpoint"


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str]] | None = msgspec.field(name="DeviceIDs", default=None)  # by NUMA node


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


def read(folder: Path) -> Mapping[tuple[str, str, str], frozenset[str]]:
    """Device IDs by pod UID, container and resource; empty where the file cannot be read. Blocks."""
    try:
        content = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("checkpoint_unreadable", folder=str(folder), problem=str(error))
        return {}
    return {
        (each.pod_uid, each.container_name, each.resource_name): frozenset().union(
            *(each.device_ids or {}).values()
        )
        for each in content.data.pod_device_entries or ()
    }
