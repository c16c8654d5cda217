"""The switcher's ports to other rooms; the composition root hands them over."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from agent.kit.cell import Cell
from agent.kubelet.podresources import PodList
from agent.model.gpu import Gpu
from agent.model.modes import Assignment, Mode


class Backend(Protocol):
    """Services that must run before a mode's units are offered, MPS daemons for one."""

    async def prepare(self, gpu: Gpu) -> None:
        """Make the GPU ready; bounded in time, and may be cancelled. Raises SetUpFailed."""

    async def give_back(self, gpu: Gpu) -> None:
        """Leave the GPU as `prepare` found it; never fails, never hangs."""

    def depends_on(self) -> object:
        """The inputs of a set-up, by value: once they differ, one that failed is tried again."""


class Holdings(Protocol):
    """Who holds what, by the kubelet's own records."""

    cell: Cell[PodList | None]  # the newest list; None: not readable
    problem: str | None

    async def refresh(self) -> PodList | None:
        """Read again now, within a bounded time; None: not readable, `problem` says why."""


class Resources(Protocol):
    """All resources of the node as one."""

    def enable(self, mode: Mode) -> None:
        """Register the resources of a mode, for the life of the process; again is nothing."""

    def refresh(self) -> None:
        """Bring all lists up to date with the assignment."""

    async def delivered(self) -> None:
        """Return when all lists as they are now have left for the kubelet, or cannot (bounded)."""

    def granted_lately(self) -> frozenset[str]:
        """Device IDs that are being handed out, or were and stand in no reading of the record yet."""


class Announcer(Protocol):
    """Keeps the scheduler from sending pods to what is about to go."""

    async def withdraw(self, ahead: Assignment, publish: Callable[[], Awaitable[None]]) -> None:
        """Call `publish`, which puts an assignment that offers less in force, when no pod is lost by it.

        Returns once the kubelet and the node's status have followed, or after a bounded time: neither an API
        server nor a kubelet that fails keeps `publish` from being called.
        """


NO_BACKENDS: Mapping[Mode, Backend] = {}
