"""Compute as pods request it by annotations: how far they may burst, and whether they come last."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from agent.vgpu.compute import ComputeRequest
from agent.vgpu.folders import About

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache

log = structlog.get_logger()

BURST = "gpu-node-agent.io/burst"
PRIORITY = "gpu-node-agent.io/priority"
LOW = "low"
_reported: dict[tuple[str, str], str] = {}
_MOST_REPORTED = 1000


class ComputeRequests:
    """Those of this node's pods."""

    def __init__(self, pods: "PodCache | None", *, may_burst: bool) -> None:
        """`may_burst`: a burst counts only where a policy says who may write the annotation."""
        self._pods = pods
        self._may_burst = may_burst

    def of(self, about: About) -> ComputeRequest:
        """The request of a container; none while its pod is not known."""
        pod = self._pods.pods().get(about.uid) if self._pods else None
        return compute_request_of(about, pod.metadata.annotations if pod else {}, may_burst=self._may_burst)


def compute_request_of(about: About, annotations: Mapping[str, str], *, may_burst: bool) -> ComputeRequest:
    """The request of a container's pod. A value that cannot be understood is left out, and logged once."""
    burst, priority = annotations.get(BURST), annotations.get(PRIORITY)
    percent = _percent(burst) if burst is not None and may_burst else None
    if burst is not None and may_burst and percent is None:
        _report(about, BURST, burst, "must be a whole number from 1 to 100: percent of a GPU")
    if priority is not None and priority != LOW:
        _report(about, PRIORITY, priority, f"must be {LOW}, or absent")
    return ComputeRequest(percent, priority == LOW)


def _percent(text: str) -> int | None:
    is_number = len(text) <= 3 and text.isascii() and text.isdigit()
    return int(text) if is_number and 1 <= int(text) <= 100 else None


def _report(about: About, annotation: str, value: str, problem: str) -> None:
    key = (about.uid, annotation)
    if _reported.get(key) == value:
        return
    if len(_reported) >= _MOST_REPORTED:
        _reported.clear()
    _reported[key] = value
    log.warning(
        "annotation_ignored",
        pod=about.pod_key,
        annotation=annotation,
        value=value[:64],
        problem=problem,
    )
