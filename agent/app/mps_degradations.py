"""Degradations of MPS: for status, /readyz and an event."""

from typing import TYPE_CHECKING

import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import follow
from agent.model.modes import Assignment, Mode
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_status import EventReason
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.cluster.event_recorder import EventRecorder

log = structlog.get_logger()


class AdvisoryCaps:
    """Whether pods can undo the caps of their shares on this node."""

    def __init__(
        self,
        settings: Settings,
        injector: Injector,
        assignment: Cell[Assignment],
        events: "EventRecorder | None",
    ) -> None:
        """`events` of the node; None: there is no way to the Kubernetes API."""
        self._settings = settings
        self._injector = injector
        self._assignment = assignment
        self._events = events

    @property
    def problem(self) -> str | None:
        """Why caps do not hold, since a pod can undo them; None: they hold, or nothing is offered by them."""
        problem = self._injector.caps_problem
        offered = any(each.mode is Mode.MPS for each in self._assignment.value.gpus.values())
        if problem is None or not offered:
            return None
        if self._events and self._injector.software is None and self._settings.injection.strategy == "auto":
            return None  # not known yet
        software = "containerd 2.0 or CRI-O 1.23 with kubelet 1.29, or newer ones"
        if self._settings.mps.advisory_caps == "refuse":
            return f"no MPS share is offered, since a pod could undo its caps here: {problem}; use {software}"
        return (
            f"caps of MPS shares are advisory here, a pod's own variables win over them: {problem}; "
            f"use {software}, or set mps.advisoryCaps: refuse"
        )

    async def run(self) -> None:
        """An event whenever caps begin to be advisory, for ever."""
        before: str | None = None

        def look() -> None:
            nonlocal before
            now = self.problem
            if now and now != before:
                log.warning("mps_caps_advisory", problem=now)
                if self._events:
                    self._events.node(EventReason.ADVISORY.value, now, warning=True)
            before = now

        await follow(look, self._assignment, self._injector.looked)


def remarks(
    settings: Settings, inventory: Cell[Snapshot], manager: DaemonManager, caps: AdvisoryCaps
) -> list[str]:
    """Degradations of MPS now, each in a sentence."""
    gpus = inventory.value.by_uuid
    found = [
        f"GPU {gpus[uuid].gpu.index if uuid in gpus else uuid}: {problem}"
        for uuid, problem in sorted(manager.leftovers.items())
    ]
    found += [
        f"GPU {gpus[uuid].gpu.index if uuid in gpus else uuid}: {status.unguarded}"
        for uuid, status in sorted(manager.statuses.value.items())
        if status.unguarded
    ]
    if caps.problem:
        found.append(caps.problem)
    single = any(each.multi_user is False for each in manager.statuses.value.values())
    if single and settings.mps.root_pods == "refuse":
        found.append(
            "MPS of this driver serves one user at a time on a GPU, and mps.rootPods lets none be root: "
            "pods that share a GPU wait for each other unless they have one runAsUser"
        )
    return found
