"""Stand-ins that change nothing of what is seen in a storm, only what a step costs.

No file of a storm outlives it, so nothing is forced onto a disk. Closing an inotify descriptor waits for
milliseconds in the kernel, so descriptors are used again. The plugin manager's look through its folder each
second, and the table of NVML faults at each call, are passed over where nothing has changed; what CDI files
say and how a device is written in an answer are worked out once. Files may lie where programs cannot be run:
nobody runs any.
"""

import ctypes
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TextIO

import anyio
import betterproto2
import yaml

from agent._proto import v1
from agent.app import reload
from agent.injection import inject
from agent.kit import files
from agent.kubelet import endpoint
from agent.modes import desired
from agent.mps import daemon_logs
from agent.simulator.faults import FaultTable
from agent.simulator.kubelet import containers, podresources_server, registry
from agent.simulator.kubelet.device_tables import NO_NUMA
from agent.vgpu import library
from tests.storm import cheaper_api, cheaper_libraries

_LIBC = ctypes.CDLL(None, use_errno=True)
_ENTRIES = files._CREATE | files._DELETE | files._MOVED_FROM | files._MOVED_TO | files._CLOSE_WRITE
_WATCHED = _ENTRIES | files._DELETE_SELF | files._MOVE_SELF | files._ONLYDIR
_idle: list[int] = []


@asynccontextmanager
async def _watching(folder: Path, growing: bool = False) -> AsyncIterator[files.FolderWatch]:
    """`inotify.watching` over a descriptor that was used before. Raises OSError."""
    descriptor: int = _idle.pop() if _idle else _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    mask = _WATCHED | (files._MODIFY if growing else 0)
    watch = _LIBC.inotify_add_watch(descriptor, os.fsencode(folder), mask)
    if watch < 0:
        number = ctypes.get_errno()
        _idle.append(descriptor)
        raise OSError(number, os.strerror(number), str(folder))
    try:
        yield files.FolderWatch(descriptor, folder)
    finally:
        anyio.notify_closing(descriptor)
        _LIBC.inotify_rm_watch(descriptor, watch)  # fails where the folder is gone, and the watch with it
        with suppress(BlockingIOError):
            while os.read(descriptor, 65536):
                pass
        _idle.append(descriptor)


def kept() -> int:
    """Descriptors that are kept to be used again."""
    return len(_idle)


_sockets = registry._sockets
_real_time_ns = partial(time.clock_gettime_ns, time.CLOCK_REALTIME)  # not the storm's
TICK_NS = 20_000_000
_seen: dict[Path, tuple[tuple[int, int], list[tuple[Path, tuple[int, int]]]]] = {}


def _sockets_if_changed(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Every socket that comes or goes changes its folder's time; the agent makes no folders there.

    Two changes within a tick of the kernel have one time: what was seen between them does not count.
    """
    status = folder.stat()
    now = status.st_ino, status.st_mtime_ns
    known = _seen.get(folder)
    if known is None or known[0] != now or _real_time_ns() - status.st_mtime_ns < TICK_NS:
        _seen.clear()
        known = _seen[folder] = now, list(_sockets(folder))
    yield from known[1]


_strike = FaultTable.strike


class NvmlFaults:
    """Whether any fault of NVML calls may stand."""

    standing = False


def _strike_if_any(self: FaultTable, call: int, slot: int) -> int:
    return _strike(self, call, slot) if NvmlFaults.standing else 0


class _Encoded(v1.ContainerDevices):
    """An entry of PodResources that keeps its bytes; nobody changes one."""

    __module__ = v1.ContainerDevices.__module__  # where the types of its fields are looked up

    def __bytes__(self) -> bytes:
        known: bytes | None = self.__dict__.get("_bytes")
        if known is None:
            known = self.__dict__["_bytes"] = super().__bytes__()
        return known


@cache
def _entry(resource: str, device: str, numa: int) -> _Encoded:
    nodes = None if numa == NO_NUMA else v1.TopologyInfo(nodes=[v1.NumaNode(id=numa)])
    return _Encoded(resource_name=resource, device_ids=[device], topology=nodes)


def _entries(resource: str, by_numa: Mapping[int, tuple[str, ...]]) -> list[_Encoded]:
    """See `podresources_server._entries`."""
    return [_entry(resource, device, numa) for numa, devices in by_numa.items() for device in devices]


def _default(self: betterproto2.Message, name: str) -> Any:
    """See `betterproto2.Message`, which looks through the filters of warnings at each field."""
    return type(self)._betterproto.default_gen[name]()  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _read_yaml(text: str) -> Any:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class _Yaml:
    """As much of `yaml` as is asked; what is read is changed by nobody."""

    SafeLoader = yaml.SafeLoader
    YAMLError = yaml.YAMLError

    @staticmethod
    def load(stream: TextIO, loader: object) -> Any:
        """Read a file once for each content."""
        del loader
        return _read_yaml(stream.read())

    safe_load = staticmethod(_read_yaml)


def install() -> None:
    """Put them in place, for this process."""
    cheaper_libraries.install()
    cheaper_api.install()
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda _: None)
    for room in (files, endpoint, daemon_logs, reload, desired):
        room.watching = _watching  # type: ignore[attr-defined]
    registry._sockets = _sockets_if_changed
    library._check_executable = lambda folder, descriptor: None  # noqa: ARG005
    FaultTable.strike = _strike_if_any  # type: ignore[method-assign]
    podresources_server._entries = _entries  # type: ignore[assignment]
    betterproto2.Message._get_field_default = _default  # type: ignore[method-assign,assignment]
    for room in (containers, inject):
        room.yaml = _Yaml  # type: ignore[attr-defined]
