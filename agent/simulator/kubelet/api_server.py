"""As much of an API server as one node needs: its status and pods."""

import hashlib
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import structlog

from agent.kit.tasks import Cell

from .pod_specs import Phase, PodSpec
from .resource_control import ClaimControl
from .resource_objects import ResourceObjects

logger = structlog.get_logger()
CONFIG = "kubernetes.io/config"


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
    deleted_at: float = 0.0  # on the clock of the loop
    admitted: bool = False
    # Annotations written since it was created.
    written: dict[str, str] = field(default_factory=dict)
    # Names of its claims by their names in the pod, and why the last try to prepare them failed.
    claims: dict[str, str] = field(default_factory=dict)
    claims_fault: str = ""

    @property
    def api_uid(self) -> str:
        """UID of the API's object. Of a static pod it is the mirror's own; `uid` is the manifest's."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, self.uid)) if self.spec.static else self.uid

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the API's object; those of a mirror pod include the one that marks it."""
        mirror = (
            {f"{CONFIG}.hash": self.uid, f"{CONFIG}.mirror": self.uid, f"{CONFIG}.source": "file"}
            if self.spec.static
            else {}
        )
        return {**self.spec.annotations, **mirror, **self.written}

    def container_id(self, name: str) -> str:
        """A runtime's ID of the pod's container: 64 hexadecimal digits, of its own for each."""
        return hashlib.sha256(f"{self.uid}/{name}".encode()).hexdigest()


class Extender(Protocol):
    """An extender of the scheduler, which has a word in where pods go and binds them."""

    async def refuses(self, pod: Pod) -> str:
        """Why the node is not for this pod; empty: it is."""

    async def bind(self, pod: Pod) -> None:
        """Bind it, or leave it for another try."""


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
        self.manifests: dict[tuple[str, str], Pod] = {}  # static pods, known to the kubelet alone
        self.changes = Cell(0)
        self.resources = ResourceObjects(self.changed)
        self._control = ClaimControl(self.resources, node_name)
        self._rng = rng
        self._created = 0
        self._observers: list[NodeObserver] = []

    def changed(self) -> None:
        """Wake all waiters: an object changed."""
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
        if spec.key in self.pods or spec.key in self.manifests:
            raise ValueError(f'pods "{spec.name}" already exists in namespace {spec.namespace}')
        return self._made(spec)

    def edit_manifest(self, spec: PodSpec) -> Pod:
        """Another static pod in place of the last one of its name, whose mirror stands until that has ended.

        The file's source makes a removal and an addition of it (`config.go`, `Merge`). Not modelled: its
        containers wait for the end of the last one's. Raises KeyError where there is none.
        """
        self.delete(self.manifests[spec.key].spec)
        del self.manifests[spec.key]
        return self._made(spec)

    def _made(self, spec: PodSpec) -> Pod:
        uid = uuid.UUID(int=self._rng.getrandbits(128), version=4)
        self._created += 1
        here = self.node_name if spec.node_name or spec.static else None
        pod = Pod(spec, uid.hex if spec.static else str(uid), self._created, here)
        pod.claims = self._control.make(spec, pod.uid)
        (self.manifests if spec.static else self.pods)[spec.key] = pod
        self.changed()
        return pod

    def mirror_static_pods(self) -> None:
        """Write the objects that stand for static pods which the kubelet has admitted.

        The pod's worker does so (`kubelet.go`, `tryReconcileMirrorPods`), beside the admission of others, and
        `Life._sync` again. One that was refused has no worker (`HandlePodAdditions`): it gets no object and
        is never tried again. Not modelled: a starting kubelet writes missing objects once beside admission,
        too (`fastStaticPodsRegistration`).
        """
        missing = [pod for key, pod in self.manifests.items() if pod.admitted and key not in self.pods]
        if missing and self.reachable:
            self.pods |= {pod.spec.key: pod for pod in missing}
            self.changed()

    def get(self, spec: PodSpec) -> Pod:
        """Raises KeyError with the pod's name where there is none."""
        pod = self.pods.get(spec.key) or self.manifests.get(spec.key)
        if pod is None:
            raise KeyError(f"pod {spec.namespace}/{spec.name} is not there")
        return pod

    def delete(self, spec: PodSpec) -> None:
        """Ask for the end of a pod: the kubelet carries it out where the pod is bound."""
        pod = self.get(spec)
        if not pod.deleting:
            pod.deleting, pod.deleted_at = True, anyio.current_time()
        if pod.node_name is None:
            self.remove(pod)
        self.changed()

    def delete_by_force(self, spec: PodSpec) -> None:
        """The object goes at once; the kubelet ends the pod's processes in its own time."""
        self.delete(spec)
        self.pods.pop(spec.key, None)
        self.changed()

    def remove(self, pod: Pod) -> None:
        """The object goes; for good, as its UID never comes back."""
        for known in (self.pods, self.manifests):
            if known.get(pod.spec.key) is pod:
                del known[pod.spec.key]
                self.changed()

    def bound_pods(self) -> list[Pod]:
        """Pods of this node, oldest first."""
        found = [pod for pod in self.pods.values() if pod.node_name == self.node_name]
        return sorted(found, key=lambda pod: pod.sequence)

    def bind(self, pod: Pod) -> None:
        """The pod is this node's from now on."""
        pod.node_name, pod.reason, pod.message = self.node_name, "", ""
        logger.debug("pod_bound", pod=f"{pod.spec.namespace}/{pod.spec.name}")
        self.changed()

    def allocate_claims(self, pod: Pod) -> str:
        """Allocate and reserve all claims of a pod, or none; why not, or nothing."""
        return self._control.allocate(pod.spec, pod.uid, pod.claims) if pod.claims else ""

    def release_claims(self) -> None:
        """Free claims whose pods run no more or are gone, as the controllers do."""
        alive = {pod.uid for pod in self.pods.values() if not pod.phase.finished}
        self._control.release(alive, {pod.uid for pod in self.pods.values()})

    def pods_of_the_kubelet(self) -> list[Pod]:
        """The kubelet's input: its manifests, then the pods that are bound to it, oldest first."""
        return [*self.manifests.values(), *(pod for pod in self.bound_pods() if not pod.spec.static)]

    def used(self, resource: str) -> int:
        """Used amounts by the scheduler's count: requests of all bound pods that have not finished."""
        return sum(pod.spec.request(resource) for pod in self.bound_pods() if not pod.phase.finished)
