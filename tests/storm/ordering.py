"""Sets of objects in the order in which their members came.

A set of tasks or connections has the order of their addresses, and who is cancelled first is part of a
history: the same seed must be the same storm whatever lies where in memory.
"""

from collections.abc import Callable
from typing import Any

from anyio._backends import _asyncio as anyio_asyncio

from agent.kubelet import grpc_server, service
from agent.simulator.kubelet import registration


class InOrder(dict[Any, None]):
    """As much of a set as those need that are replaced."""

    remove = dict.__delitem__
    add = dict.setdefault  # None, and nothing for one that is there

    def discard(self, member: Any) -> None:
        """As a set has it."""
        self.pop(member, None)


def _ordered(kind: type, *names: str) -> None:
    made: Callable[..., None] = kind.__init__  # type: ignore[misc]

    def make(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        for name in names:
            setattr(self, name, InOrder())

    kind.__init__ = make  # type: ignore[misc]


_KINDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (anyio_asyncio.CancelScope, ("_tasks", "_child_scopes")),
    (anyio_asyncio.TaskGroup, ("_tasks",)),
    (service.DevicePluginService, ("_waiting",)),
    (grpc_server._TrackingServer, ("connections",)),
    (registration.Plugins, ("_open",)),
)
_installed: list[bool] = []


def install() -> None:
    """Put them in place, for this process."""
    if not _installed:
        _installed.append(True)
        for kind, names in _KINDS:
            _ordered(kind, *names)
