"""The pods of this node as MPS needs them: marks of their clients, holders of shares, who may be root."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from agent.cluster.pods import PodCache
from agent.model.holding import GpuHolder, Record
from agent.model.modes import Mode
from agent.model.pod import MPS

USER_UNKNOWN = "its user is not known without the Kubernetes API"


@dataclass(frozen=True, slots=True)
class PodFacts:
    """A pod; `uid` is the one that its cgroups carry.

    `dies_at` is when its grace period ends by the API server's clock, None while nobody deletes it.
    """

    uid: str
    namespace: str
    name: str
    dies_at: dt.datetime | None = None
    grace_seconds: float | None = None
    # IDs by name, as far as they were created.
    containers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"


Pods = Callable[[], Sequence[PodFacts]]


def pod_facts(pods: PodCache | None) -> Pods:
    """The pods of the node; without the Kubernetes API none is known."""

    def facts() -> Sequence[PodFacts]:
        if pods is None:
            return ()
        return [
            PodFacts(
                uid,
                pod.metadata.namespace,
                pod.metadata.name,
                # deletionTimestamp is the end of the grace period, not its beginning.
                dt.datetime.fromisoformat(text) if (text := pod.metadata.deletion_timestamp) else None,
                pod.metadata.deletion_grace_period_seconds,
                {name: each for each, name in pod.container_names.items()},
            )
            for uid, pod in pods.cgroup_uids().pods.items()
        ]

    return facts


def share_holders(record: Record | None) -> Mapping[str, Sequence[GpuHolder]]:
    """Containers with MPS shares, by UUID of the GPU; empty, too, while it is not known who holds what."""
    held = record.by_gpu if record else {}
    shares = {uuid: [each for each in holders if each.mode is Mode.MPS] for uuid, holders in held.items()}
    return {uuid: holders for uuid, holders in shares.items() if holders}


class RootCheck:
    """Why containers may run as root, by the pods' security contexts, in words; None: they cannot."""

    def __init__(self, pods: PodCache | None) -> None:
        """`pods`: those of the node; None: there is no way to the Kubernetes API."""
        self._pods = pods

    def named(self, namespace: str, pod: str, container: str) -> str | None:
        """One container.

        The kubelet hands an init container's units to an app container, and names that one alone: any
        container of the pod that asks for cores may be the one that starts.
        """
        if self._pods is None:
            return USER_UNKNOWN
        found = self._pods.find(namespace, pod)
        if found is None:
            return "its specification is not known yet"
        spec = found.spec
        others = [
            each.name
            for each in (*spec.init_containers, *spec.containers)
            if MPS.core in each.resources.limits and each.name != container
        ]
        if why := found.may_run_as_root(container):
            return why
        for name in others:
            if why := found.may_run_as_root(name):
                return f"container {name} of the pod, whose cores it may have: {why}"
        return None

    def unnamed(self, cores: int, known: AbstractSet[tuple[str, str, str]]) -> str | None:
        """A container that asks for so many cores, whichever of the node's it is, but none of `known`."""
        if self._pods is None:
            return USER_UNKNOWN
        suspects = [
            (pod, container.name)
            for pod in self._pods.pods().values()
            if not pod.finished
            for container in (*pod.spec.init_containers, *pod.spec.containers)
            if container.resources.limits.get(MPS.core) == str(cores)
            and (pod.metadata.namespace, pod.metadata.name, container.name) not in known
        ]
        for pod, name in suspects:
            if why := pod.may_run_as_root(name):
                where = f"{pod.metadata.namespace}/{pod.metadata.name}"
                return f"container {name} of {where} may run as root ({why})"
        return None if suspects else "no container that asks for so many is known"
