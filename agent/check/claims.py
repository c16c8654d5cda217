"""Looks at what claims (DRA) need: the API server's version and gates, CDI, the kubelet's folder."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.check.host import HostFiles
from agent.check.kubelet import CheckedNode, listens
from agent.cluster.api import ApiError, connect
from agent.cluster.lean import NoClusterAccess
from agent.dra.support import problem_of
from agent.holdings import claim_checkpoint
from agent.kubelet.claim_service import SOCKET
from agent.model.look import Look
from agent.settings import Settings

SUBJECT = "claims (DRA)"


@dataclass(frozen=True, slots=True)
class ClaimSupport:
    """The cluster's answer; both empty: it has what claims need."""

    problem: str = ""
    unread: str = ""  # why it is not known


async def claim_support(settings: Settings, facts: CheckedNode | None) -> ClaimSupport | None:
    """Ask the API server, which changes nothing (dryRun); None: the door is closed."""
    if not settings.dra.enabled:
        return None
    if settings.cluster.access == "off":
        return ClaimSupport(problem="cluster.access is off, and slices stand in the cluster: claims need it")
    kubeconfig = Path(settings.cluster.kubeconfig) if settings.cluster.kubeconfig else None
    try:
        async with await connect(kubeconfig) as api:
            kubelet = facts.software.kubelet_version if facts else ""
            return ClaimSupport(await problem_of(api, settings.cluster.own_node, kubelet))
    except (NoClusterAccess, ApiError, msgspec.DecodeError) as error:
        return ClaimSupport(unread=str(error))


def look_at_claims(
    settings: Settings, host: HostFiles, support: ClaimSupport | None, *, by_cdi: bool
) -> Iterator[Look]:
    """Blocks."""
    if support is None:
        return
    if support.problem:
        yield Look.failed(SUBJECT, support.problem)
    elif support.unread:
        yield Look.unknown(SUBJECT, f"the cluster could not be asked: {support.unread}")
    else:
        yield Look.ok(SUBJECT, "the API server keeps all that devices need")
    if not (by_cdi or settings.simulator.profile):
        yield Look.failed(
            SUBJECT, "claims bring GPUs by CDI alone, and containers get none so (see CDI above)"
        )
    kubelet = host.folder(settings.kubelet.root)
    registration = kubelet / "plugins_registry" / SOCKET
    if registration.exists() and not listens(registration):
        text = f"nobody listens at {registration}: an agent with this driver has ended, and its claims wait"
        yield Look.warning(SUBJECT, text)
    try:
        known = claim_checkpoint.read(kubelet)
    except claim_checkpoint.ClaimsUnreadable as error:
        yield Look.failed(SUBJECT, str(error))
    else:
        record = kubelet / claim_checkpoint.FILE_NAME
        held = f"{len(known)} prepared here" if known is not None else "no record to be seen, or none yet"
        yield Look.ok(SUBJECT, f"{held} ({record})")
