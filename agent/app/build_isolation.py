"""Builds the limits of vGPU containers. Imported only where `vgpu.enforcement` is not off."""

from collections.abc import Callable
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from agent.app.agent import Agent
from agent.isolation.errors import IsolationError
from agent.isolation.folders import LimitFolders
from agent.isolation.library import IMAGE_FILE
from agent.isolation.room import Isolation, Policy, Request
from agent.kubelet.api import Allocation, Mount, Reason, Refused
from agent.model.demand import VGPU
from agent.model.ledger import PairMember
from agent.pairing.reducer import Grant

log = structlog.get_logger()


async def build_isolation(agent: Agent, group: TaskGroup) -> Isolation:
    """Build the room, find what containers that run have, and start its tasks."""
    settings, spawn = agent.settings, agent.supervisor.restarting
    isolation = Isolation(
        LimitFolders(Path(settings.host.run)),
        Path(settings.vgpu.library or IMAGE_FILE),
        Path(settings.host.state),
        Policy(settings.vgpu.enforcement),
        agent.holdings.cell,
        _namespaces(agent, group),
    )
    await isolation.start()
    group.start_soon(spawn, "limits", isolation.run)
    return isolation


class VgpuFence:
    """What the limits of a container add to the answer for its memory."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation

    async def __call__(self, member: PairMember, grant: Grant) -> Allocation:
        """See agent.plugins.fractions.Sharing. Whole GPUs need no fence: nobody else is on them."""
        if member is not PairMember.MEMORY or grant.demand.whole:
            return Allocation()
        request = Request(
            grant.pod.uid,
            grant.pod.namespace,
            grant.pod.name,
            grant.container,
            grant.gpus[0],
            tuple(sorted(grant.ids)),
            len(grant.ids) * VGPU.block_bytes,
            grant.demand.cores,
        )
        try:
            binds = await self._isolation.admit(request)
        except IsolationError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        return Allocation(
            mounts=tuple(Mount(each.container_path, str(each.host_path), each.read_only) for each in binds)
        )


def _namespaces(agent: Agent, group: TaskGroup) -> Callable[[str], Policy | None]:
    """What namespaces have of their own; without the API server nothing."""
    if agent.cluster is None:
        return lambda _: None
    from agent.cluster.namespaces import LABEL, NamespaceLabels  # noqa: PLC0415  loads the client

    labels = NamespaceLabels(agent.cluster.api)
    group.start_soon(agent.supervisor.restarting, "namespace watch", labels.run)
    told: dict[str, str] = {}

    def of(namespace: str) -> Policy | None:
        value = labels.of(namespace)
        if value is None:
            return None
        try:
            return Policy(value)
        except ValueError:
            if told.get(namespace) != value:
                told[namespace] = value
                known = ", ".join(each.value for each in Policy)
                log.warning(
                    "namespace_label_ignored", namespace=namespace, label=LABEL, value=value, known=known
                )
            return None

    return of
