"""Builds the shares of compute of vGPU containers. Imported only where `vgpu.enforcement` is not off."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
import structlog

from agent.isolation.compute import Compute, ComputeRequest, Work, release
from agent.isolation.compute_request import compute_request_of
from agent.isolation.folders import About
from agent.isolation.room import Isolation
from agent.isolation.watch import Place
from agent.model.modes import Mode
from agent.settings import Vgpu
from agent.telemetry.attribution import Attribution
from agent.telemetry.container_use import Uses

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache

log = structlog.get_logger()


async def build_compute(settings: Vgpu, isolation: Isolation, pods: "PodCache | None") -> Compute | None:
    """The shares of containers; None where nobody is to be held to one."""
    if settings.compute == "off":
        await anyio.to_thread.run_sync(release, isolation, abandon_on_cancel=True)
        return None
    if settings.enforcement not in ("library", "strict"):
        log.warning(
            "compute_not_enforced",
            problem="shares of compute are kept by the enforcement library, which containers do not get",
            remedy="set vgpu.enforcement to library or strict",
        )
    request = partial(_request_of, pods, settings.resize) if pods else _none
    return Compute(isolation, request, soft=settings.compute == "soft")


def _request_of(pods: "PodCache", may_burst: bool, about: About) -> ComputeRequest:
    """A burst counts only where a policy says who may write the annotation."""
    pod = pods.pods().get(about.uid)
    return compute_request_of(about, pod.metadata.annotations if pod else {}, may_burst=may_burst)


def _none(_about: About) -> ComputeRequest:
    return ComputeRequest()


def work_of(uses: Uses) -> Mapping[Place, Work]:
    """Use of vGPU containers as the driver measured it."""
    return {
        (share.namespace, share.pod, share.container, share.gpu): Work(
            each.use.utilization * 100, each.use.working
        )
        for each in uses.containers
        for share in (each.use.share,)
        if share.mode is Mode.VGPU and each.use.utilization_grade is Attribution.MEASURED
    }
