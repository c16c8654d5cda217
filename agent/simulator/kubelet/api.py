"""As much of a control plane as one node needs: Node status, Pods, a scheduler that counts totals."""

import hashlib
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from agent.kit.cell import Cell

from .pods import Phase, PodSpec

logger = structlog.get_logger()
UNSCHEDULABLE = "Unschedulable"


@dataclass(slots=True, eq=False)
class Pod:
    """A Pod object: its spec, and what scheduler and kubelet have written into its status."""

    spec: PodSpec
    uid: str
    sequence: int  # order of creation
    node_name: str | None
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    # Why a container waits, by name: reason and message (`CreateContainerConfigError`, ...).
    waiting: Mapping[str, tuple[str, str]] | None = None
    deleting: bool = False
    # Annotations written since it was created.
    written: dict[str, str] = field(default_factory=dict)

    def container_id(self, name: str) -> str:
        """What a runtime would call the pod's container: 64 hexadecimal digits, of its own for each."""
        return hashlib.sha256(f"{self.uid}/{name}".encode()).hexdigest()


NodeObserver = Callable[[Mapping[str, int], Mapping[str, int]], None]


class Api:
    """Node status and pods. `changes` is published at every change of anything."""

    def __init__(self, node_name: str, rng: random.Random) -> None:
        self.node_name = node_name
        # A kubelet that starts while this is False hears of no pod; one that runs knows its own.
        self.reachable = True
        self.capacity: dict[str, int] = {}
        self.allocatable: dict[str, int] = {}
        self.taints: list[dict[str, str]] = []
        self.pods: dict[tuple[str, str], Pod] = {}
        self.changes = Cell(0)
        self._rng = rng
        self._created = 0
        self._observers: list[NodeObserver] = []

    def changed(self) -> None:
        """Tell all who wait that an object changed."""
        self.changes.publish(self.changes.version + 1)

    # Node

    def set_node_status(self, capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> None:
        """Write the node's status, as the kubelet does at its tick, or a patch of nodes/status."""
        if (dict(capacity), dict(allocatable)) != (self.capacity, self.allocatable):
            self.capacity, self.allocatable = dict(capacity), dict(allocatable)
            for observer in tuple(self._observers):
                observer(self.capacity, self.allocatable)
            self.changed()

    @contextmanager
    def observing_node(self, observer: NodeObserver) -> Iterator[None]:
        """Call `observer(capacity, allocatable)` at every change of the node's status."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    # Pods

    def create(self, spec: PodSpec) -> Pod:
        """Raises ValueError for a name that is taken."""
        if spec.key in self.pods:
            raise ValueError(f'pods "{spec.name}" already exists in namespace {spec.namespace}')
        uid = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        self._created += 1
        pod = Pod(spec, uid, self._created, node_name=self.node_name if spec.node_name else None)
        self.pods[spec.key] = pod
        self.changed()
        return pod

    def get(self, spec: PodSpec) -> Pod:
        """Raises KeyError with the pod's name where there is none."""
        pod = self.pods.get(spec.key)
        if pod is None:
            raise KeyError(f"pod {spec.namespace}/{spec.name} is not there")
        return pod

    def delete(self, spec: PodSpec) -> None:
        """Ask for the end of a pod: the kubelet carries it out where the pod is bound."""
        pod = self.get(spec)
        pod.deleting = True
        if pod.node_name is None:
            self.remove(pod)
        self.changed()

    def remove(self, pod: Pod) -> None:
        """The object goes; for good, as its UID never comes back."""
        if self.pods.get(pod.spec.key) is pod:
            del self.pods[pod.spec.key]
            self.changed()

    def bound_pods(self) -> list[Pod]:
        """Pods of this node, oldest first."""
        found = [pod for pod in self.pods.values() if pod.node_name == self.node_name]
        return sorted(found, key=lambda pod: pod.sequence)

    def used(self, resource: str) -> int:
        """What the scheduler counts as taken: requests of all bound pods that have not finished."""
        return sum(pod.spec.request(resource) for pod in self.bound_pods() if not pod.phase.finished)


class Scheduler:
    """Binds a pod as soon as the node's totals suffice; looks again whenever anything changes."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def run(self) -> None:
        """Schedule for ever, oldest pods first."""
        seen = -1
        while True:
            seen = await self._api.changes.wait_change(seen)
            waiting = [pod for pod in self._api.pods.values() if pod.node_name is None and not pod.deleting]
            for pod in sorted(waiting, key=lambda each: each.sequence):
                self._consider(pod)

    def _consider(self, pod: Pod) -> None:
        # No pod here tolerates anything.
        untolerated = [each["key"] for each in self._api.taints if each["effect"] != "PreferNoSchedule"]
        short = [r for r in pod.spec.resources if pod.spec.request(r) and not self._fits(pod, r)]
        if not short and not untolerated:
            pod.node_name, pod.reason, pod.message = self._api.node_name, "", ""
            logger.debug("pod_bound", pod=f"{pod.spec.namespace}/{pod.spec.name}")
            self._api.changed()
            return
        causes = ", ".join(
            [f"1 node(s) had untolerated taint {{{key}: }}" for key in untolerated]
            or [f"1 Insufficient {resource}" for resource in short]
        )
        message = f"0/1 nodes are available: {causes}."
        if (pod.reason, pod.message) != (UNSCHEDULABLE, message):
            pod.reason, pod.message = UNSCHEDULABLE, message
            self._api.changed()

    def _fits(self, pod: Pod, resource: str) -> bool:
        free = self._api.allocatable.get(resource, 0) - self._api.used(resource)
        return pod.spec.request(resource) <= free
