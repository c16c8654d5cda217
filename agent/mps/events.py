"""Events of the node about MPS: reports of its daemons with the pods concerned, and advisory caps."""

from typing import TYPE_CHECKING

import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import follow
from agent.kubelet.podresources import PodList
from agent.model.modes import Assignment, Mode
from agent.mps.daemon_status import EventReason
from agent.mps.pods import Pods, share_holders
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.cluster.event_recorder import EventRecorder

log = structlog.get_logger()


class MpsEvents:
    def __init__(
        self,
        inventory: Cell[Snapshot],
        record: Cell[PodList | None],
        events: "EventRecorder | None",
        pods: Pods,
    ) -> None:
        """`events` of the node; None: there is no way to the Kubernetes API. `pods` of the node."""
        self._pods = pods
        self._inventory = inventory
        self._record = record
        self._events = events

    def report(self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
        """Make an event and a line in the log; `pids` are processes that the message is about."""
        state = self._inventory.value.by_uuid.get(uuid)
        gpu = f"GPU {state.gpu.index} ({uuid})" if state else f"GPU {uuid}"
        text = f"{gpu}: {message}"
        if kind is EventReason.FAULT:
            if pods := sorted({each.pod for each in share_holders(self._record.value).get(uuid, ())}):
                text += f"; every MPS client of the GPU is affected: {', '.join(pods)} must be restarted"
            if pids:
                text += f"; the log names process {', '.join(map(str, sorted(pids)))}"
        if kind is EventReason.SILENT:
            for pod in self._pods():
                # The supervisor of a daemon knows a pod by its cgroup, which has the UID.
                text = text.replace(f"pod {pod.uid}", f"pod {pod.key}")
        warning = kind is not EventReason.RECOVERED
        (log.warning if warning else log.info)("mps_report", gpu=uuid, reason=kind.value, message=text)
        if self._events:
            self._events.node(kind.value, text, warning=warning)


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
        """Report caps whenever they begin to be advisory, until cancelled."""
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
