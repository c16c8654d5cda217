"""Events of the node about MPS: reports of its daemons with the pods concerned, and advisory caps."""

import structlog

from agent.kit.follow import follow
from agent.model.modes import Mode
from agent.modes.wing import Node
from agent.mps.daemon_status import EventReason
from agent.mps.pods import Pods, share_holders

log = structlog.get_logger()


class MpsEvents:
    def __init__(self, node: Node, pods: Pods) -> None:
        self._node = node
        self._pods = pods

    def report(self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
        """Make an event and a line in the log; `pids` are processes that the message is about."""
        state = self._node.snapshot.value.by_uuid.get(uuid)
        gpu = f"GPU {state.gpu.index} ({uuid})" if state else f"GPU {uuid}"
        text = f"{gpu}: {message}"
        if kind is EventReason.FAULT:
            holders = share_holders(self._node.holdings.cell.value).get(uuid, ())
            if pods := sorted({each.pod for each in holders}):
                text += f"; every MPS client of the GPU is affected: {', '.join(pods)} must be restarted"
            if pids:
                text += f"; the log names process {', '.join(map(str, sorted(pids)))}"
        if kind is EventReason.SILENT:
            for pod in self._pods():
                # The supervisor of a daemon knows a pod by its cgroup, which has the UID.
                text = text.replace(f"pod {pod.uid}", f"pod {pod.key}")
        warning = kind is not EventReason.RECOVERED
        (log.warning if warning else log.info)("mps_report", gpu=uuid, reason=kind.value, message=text)
        self._node.event(kind.value, text, warning=warning)


class AdvisoryCaps:
    """Whether pods can undo the caps of their shares on this node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def problem(self) -> str | None:
        """Why caps do not hold, since a pod can undo them; None: they hold, or nothing is offered by them."""
        settings, injector = self._node.settings, self._node.injector
        problem = injector.caps_problem
        if problem is None or not self._node.offers(Mode.MPS):
            return None
        if self._node.cluster and injector.software is None and settings.injection.strategy == "auto":
            return None  # not known yet
        software = "containerd 2.0 or CRI-O 1.23 with kubelet 1.29, or newer ones"
        if settings.mps.advisory_caps == "refuse":
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
                self._node.event(EventReason.ADVISORY.value, now, warning=True)
            before = now

        await follow(look, self._node.assignment, self._node.injector.looked)
