"""The kubelet's checkpoint of devices: the one record that shows what plain init containers hold.

Layout: kubelet 1.20 to 1.36, `pkg/kubelet/cm/devicemanager/checkpoint`. It is replaced, by a rename, when
all devices of a container are allocated and with each list of a plugin. The kubelet forgets pods that have
ended when somebody asks it for devices or for PodResources; it names them until the next writing.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE_NAME = "kubelet_internal_checkpoint"

# Device IDs by pod UID, container and resource.
_Place = tuple[str, str, str]
Entries = Mapping[_Place, frozenset[str]]


class CheckpointUnreadable(Exception):
    """There is a checkpoint, and it cannot be read or understood; the text names it and says why."""


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str]] | None = msgspec.field(name="DeviceIDs", default=None)  # by NUMA node


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[msgspec.Raw] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


class Checkpoint:
    """Reads the file when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._stamp: object = None
        self._entries: Entries = {}
        # By their bytes: each admission replaces the file, in which one entry is new.
        self._known: Mapping[bytes, tuple[_Place, frozenset[str]]] = {}

    def read(self) -> Entries:
        """The entries; none where there is no file. The same object until it changes. Blocks.

        Raises CheckpointUnreadable.
        """
        try:
            stat = self._file.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                content = msgspec.json.decode(self._file.read_bytes(), type=_File)
                raw = map(bytes, content.data.pod_device_entries or ())
                self._known = {each: self._known.get(each) or _entry(each) for each in raw}
                self._entries = dict(self._known.values())
                self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._entries = None, {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._stamp = None
            raise CheckpointUnreadable(
                f"the kubelet's checkpoint {self._file} is not readable: {error}"
            ) from error
        return self._entries


def _entry(raw: bytes) -> tuple[_Place, frozenset[str]]:
    each = msgspec.json.decode(raw, type=_Entry)
    ids = frozenset[str]().union(*(each.device_ids or {}).values())
    return (each.pod_uid, each.container_name, each.resource_name), ids
