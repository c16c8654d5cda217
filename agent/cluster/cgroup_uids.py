"""From the UID in a pod's cgroups to the pod: pure.

The kubelet names the cgroups of a static pod by a UID of its own, which the API server does not know; the
object that mirrors it carries that UID in the annotation `kubernetes.io/config.hash` (the kubelet's
pkg/kubelet/pod/mirror_client.go). Any tenant may write that annotation, and `kubernetes.io/config.mirror`
beside it: it counts only where the object is owned by this Node, and never for a UID that is another pod's.
Owners a tenant may write, too: so each pod stays known by the UID that the API server gave it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from agent.cluster.reflector import Item
from agent.model.metadata import Metadata

HASH_ANNOTATION = "kubernetes.io/config.hash"


@dataclass(frozen=True, slots=True)
class CgroupUids(Generic[Item]):
    """`pods` by the UIDs that their cgroups may carry; `contested`: claimed by several pods, so nobody's."""

    pods: Mapping[str, Item]
    contested: frozenset[str] = frozenset()


def cgroup_uids(pods: Mapping[str, Item], node: str, node_uid: str | None) -> CgroupUids[Item]:
    """Of the pods of a node, by the API server's UID. `node_uid`: of the Node object; None: not known yet."""
    claims: dict[str, list[str]] = {}
    for uid, pod in pods.items():
        claimed = pod.metadata.annotations.get(HASH_ANNOTATION)
        if claimed and claimed not in pods and _mirrors(pod.metadata, node, node_uid):
            claims.setdefault(claimed, []).append(uid)
    if not claims:
        return CgroupUids(pods)
    found = dict(pods)
    for claimed, claimants in claims.items():
        if len(claimants) == 1:
            found[claimed] = pods[claimants[0]]
    return CgroupUids(found, frozenset(claimed for claimed, each in claims.items() if len(each) > 1))


def _mirrors(metadata: Metadata, node: str, node_uid: str | None) -> bool:
    """Whether the kubelet of this node made the object: it makes the Node its controller."""
    return any(
        each.controller
        and (each.api_version, each.kind, each.name) == ("v1", "Node", node)
        and node_uid in (None, each.uid)
        for each in metadata.owner_references
    )
