"""The pods of this node, as the API server shows them, their namespaces and their cgroups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi, Query, understood
from agent.cluster.reflector import Item, PartialObject, Reflector
from agent.model.modes import is_offered
from agent.model.placement import ASSIGNED, BURST, HINT, HINT_NODE, POLICY, PRIORITY, RESIZE
from agent.model.pod import (
    ContainerSpec,
    Metadata,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
    Requirements,
)

# Settings of namespaces for limits: the label `gpu-node-agent.io/enforcement`.

log = structlog.get_logger()

LABEL = "gpu-node-agent.io/enforcement"
# The first copy takes some milliseconds where the API server answers. Where it does not, pods that the agent
# knows are admitted all the same, so this is waited for once in the agent's life and not for each of them.
FIRST_COPY_SECONDS = 1.0


class NamespaceLabels:
    """The namespaces that carry the label; others are not even listed."""

    label = LABEL

    def __init__(self, api: KubeApi) -> None:
        self.reflector = Reflector(
            api, "/api/v1/namespaces", {"labelSelector": LABEL}, PartialObject, "namespaces"
        )
        self._seen: Mapping[str, PartialObject] = {}
        self._labels: Mapping[str, str] = MappingProxyType({})
        self._until: float | None = None  # on anyio's clock; all who ask wait until then

    async def known(self) -> None:
        """Return once the labels have been seen, or `FIRST_COPY_SECONDS` after the first call of all."""
        items = self.reflector.items
        if items.version:  # what is published first is complete
            return
        now = anyio.current_time()
        first = self._until is None
        self._until = now + FIRST_COPY_SECONDS if self._until is None else self._until
        with anyio.move_on_after(max(0.0, self._until - now)):
            await items.wait_change(0)
            return
        if first:
            log.warning(
                "namespace_labels_unknown",
                waited_seconds=FIRST_COPY_SECONDS,
                action="until they are, the node's vgpu.enforcement holds in every namespace",
                problem=self.reflector.problem,
            )

    def of(self, namespace: str) -> str | None:
        """The label's value, as last seen; None: the namespace has none."""
        items = self.reflector.items.value
        if items is not self._seen:
            self._seen = items
            self._labels = {each.metadata.name: each.metadata.labels[LABEL] for each in items.values()}
        return self._labels.get(namespace)


# From the UID in a pod's cgroups to the pod: pure.
#
# The kubelet names the cgroups of a static pod by a UID of its own, which the API server does not know; the
# object that mirrors it carries that UID in the annotation `kubernetes.io/config.hash` (the kubelet's
# pkg/kubelet/pod/mirror_client.go). Any tenant may write that annotation, and `kubernetes.io/config.mirror`
# beside it: it counts only where the object is owned by this Node, and never for a UID that is another pod's.
# Owners a tenant may write, too: so each pod stays known by the UID that the API server gave it.

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


# As much of a pod as is kept.
#
# One that has finished stays until the controller manager counts 12,500 in the cluster, and 256 KiB of
# annotations of each pod are its tenant's: whole copies would take all of the agent's memory.

# The annotations that are read of a pod, beside the hint for each of its containers.
READ = frozenset({HASH_ANNOTATION, ASSIGNED, HINT_NODE, POLICY, RESIZE, BURST, PRIORITY})
# In characters: no reader takes an annotation that is longer, whole or cut.
LONGEST, LONGEST_RESIZE = 1 << 10, (16 << 10) + 1
LONGEST_MESSAGE = 2 << 10  # in characters, of the kubelet's on a pod that it refused
MOST_STATUSES = 16  # of the containers of a pod that has finished


def kept(pod: Pod) -> Pod:
    """A pod without what nobody looks at, which is most of one that has finished."""
    spec, found = pod.spec, pod.annotations
    hints = (f"{HINT}{number}" for number in range(len(spec.containers) + len(spec.init_containers)))
    read = {HASH_ANNOTATION} if pod.finished else READ.union(hints)
    longest = {RESIZE: LONGEST_RESIZE}
    owners = [each for each in pod.metadata.owner_references if _is_short(each)]
    metadata = replace(
        pod.metadata,
        labels={},
        annotations={name: found[name][: longest.get(name, LONGEST)] for name in read & found.keys()},
        owner_references=owners[:1] + [each for each in owners[1:] if each.controller][:1],
    )
    return _finished(pod, metadata) if pod.finished else replace(pod, metadata=metadata)


def _is_short(owner: OwnerReference) -> bool:
    """Whether it is as names are; any text passes for one."""
    return sum(map(len, (owner.api_version, owner.kind, owner.name, owner.uid))) <= LONGEST


def _finished(pod: Pod, metadata: Metadata) -> Pod:
    """Its phase, the containers that it had, and, where it had none, for which resource it was refused."""
    status = PodStatus(
        pod.status.phase,
        pod.status.reason,
        pod.status.message[:LONGEST_MESSAGE],
        container_statuses=pod.status.container_statuses[:MOST_STATUSES],
        init_container_statuses=pod.status.init_container_statuses[:MOST_STATUSES],
    )
    every = () if status.container_statuses else (*pod.spec.containers, *pod.spec.init_containers)
    asked = (name for each in every for name in pod.asked_of(each) if is_offered(name))
    return Pod(metadata, _asking(next(asked, "")), status)


@lru_cache(maxsize=64)
def _asking(resource: str) -> PodSpec:
    return PodSpec([ContainerSpec("", Requirements({resource: "1"}))]) if resource else PodSpec()


class _Pods(Reflector[Pod]):
    def _decoded(self, raw: msgspec.Raw) -> Pod:
        return kept(super()._decoded(raw))


# The pods of this node, as the API server shows them.

MISS_SECONDS = 1.0  # a GET in the middle of an admission, which holds up all pods of the node

Read = TypeVar("Read")


class _PodList(msgspec.Struct):
    kind: Literal["PodList"]
    items: list[Pod]


class PodCache:
    """Pods bound to one node, as `reflector` keeps them."""

    def __init__(self, api: KubeApi, node: str, node_uid: Callable[[], str | None] = lambda: None) -> None:
        """`node_uid`: the UID of the Node object; None: not known yet."""
        self._api = api
        self.node = node
        self._node_uid = node_uid
        self._by_cgroup: tuple[object, str | None, CgroupUids[Pod]] = (None, None, CgroupUids({}))
        selector = {"fieldSelector": f"spec.nodeName={node}"}
        self.reflector: Reflector[Pod] = _Pods(api, "/api/v1/pods", selector, Pod, "pods")

    def pods(self) -> Mapping[str, Pod]:
        """The pods as last seen, by UID."""
        return self.reflector.items.value

    def uids(self) -> Mapping[tuple[str, str], str]:
        """UIDs by namespace and name."""
        return {pod.key: uid for uid, pod in self.pods().items()}

    def cgroup_uids(self) -> CgroupUids[Pod]:
        """The pods as last seen by their cgroups' UIDs, with the UIDs that more than one pod claims."""
        pods, uid = self.pods(), self._node_uid()
        if self._by_cgroup[0] is not pods or self._by_cgroup[1] != uid:
            self._by_cgroup = (pods, uid, cgroup_uids(pods, self.node, uid))
        return self._by_cgroup[2]

    def find(self, namespace: str, name: str) -> Pod | None:
        """A pod that has not finished; None: none is known. Of a name there may be another by now."""
        for pod in self.pods().values():
            if pod.metadata.name == name and pod.metadata.namespace == namespace and not pod.finished:
                return pod
        return None

    async def get(self, namespace: str, name: str) -> Pod | None:
        """A pod from the copy, or by one GET within a second; None: there is no such pod. Raises ApiError.

        A copy that is ending may have a namesake that the watch has not shown yet: ask then, too.
        """
        pod = self.find(namespace, name)
        if pod and not pod.metadata.deletion_timestamp:
            return pod
        return await self.fetch(namespace, name)

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """A pod by one GET within a second, whatever the copy shows. Raises ApiError."""
        try:
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            pod = await self._read(path, Pod, f"pod {namespace}/{name}")
        except ApiRefused as error:
            if error.misses("pods", name):
                return None
            raise
        if pod.key != (namespace, name) or not pod.uid:
            raise ApiError(f"the answer for pod {namespace}/{name} is another object; is a proxy in between?")
        return pod

    async def list_now(self) -> Sequence[Pod]:
        """The node's pods but finished ones, as of now, by one list within a second. Raises ApiError."""
        # In one piece: thousands that have finished would take the agent's memory.
        query = {"fieldSelector": f"spec.nodeName={self.node},status.phase!=Succeeded,status.phase!=Failed"}
        found = await self._read("/api/v1/pods", _PodList, "the list of the node's pods", query)
        return found.items

    async def _read(self, path: str, kind: type[Read], what: str, query: Query = None) -> Read:
        try:
            with anyio.fail_after(MISS_SECONDS):
                return understood(await self._api.get(path, query, deadline=MISS_SECONDS), kind, what)
        except TimeoutError as error:
            raise ApiUnavailable(f"{what} could not be read within {MISS_SECONDS:g} s") from error
