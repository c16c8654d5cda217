"""Pairing's ports to the outside, and its refusals."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum

import structlog

from agent.model.demand import WAITING_FOR_GPU
from agent.model.placement import ASSIGNED, HINT, places
from agent.model.pod import Pod

log = structlog.get_logger()


class Cause(Enum):
    INVALID = "invalid"  # asking again will not help
    EXHAUSTED = "exhausted"  # no GPU has room
    UNAVAILABLE = "unavailable"  # who asks, or who holds what, is not known


class PairRefused(Exception):
    """A request that is not granted. The text reaches the pod's status: object, cause and remedy."""

    def __init__(self, message: str, cause: Cause = Cause.INVALID, pod: Pod | None = None) -> None:
        """`pod`: whose request it is, where that is known."""
        self.cause = cause
        self.pod = pod
        super().__init__(message)


class PodsUnavailable(Exception):
    """A pod's spec cannot be read now; the text says why."""


class PodSource:
    """Specs of the pods that are bound to this node. This one has no API server behind it."""

    def pods_on_node(self) -> Collection[Pod]:
        """The pods as last seen; never waits."""
        return ()

    def current(self) -> bool:
        """Whether pods come and go in `pods_on_node`, as far as is known."""
        return True

    async def get(self, namespace: str, name: str) -> Pod | None:
        """One pod, read again unless a good copy is there; else as `fetch`."""
        return await self.fetch(namespace, name)

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """One pod, read again, within a second; None: there is none. Raises PodsUnavailable."""
        raise PodsUnavailable(f"pod {namespace}/{name} cannot be read: the agent has no API server")

    async def list_now(self) -> Collection[Pod]:
        """All pods of this node by the API server's word of now, within a second. Raises PodsUnavailable."""
        raise PodsUnavailable("the node's pods cannot be listed: the agent has no API server")


class Recorder:
    """Reports to pods' owners; never waits. This one writes to the log alone."""

    def refused(self, pod: Pod, message: str) -> None:
        """A request of the pod was refused; the socket's service logs it."""
        # The kubelet may ask for both members before it gives the pod up: one event says it.
        self.event(pod, "AllocationRefused", message, key="refused")

    def waiting(self, pod: Pod, message: str, key: str) -> None:
        """A container of the pod cannot start yet; the kubelet tries again. `key`: what it waits for."""
        self.event(pod, WAITING_FOR_GPU, message, key=key)

    def hint_ignored(self, pod: Pod, message: str) -> None:
        """The scheduler's choice was not followed."""
        log.warning("placement_hint_ignored", pod=f"{pod.namespace}/{pod.name}", reason=message)
        self.event(pod, "PlacementHintIgnored", message)

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        """A container has its GPUs. `last`: no later container of the pod asks for GPUs of this pair.

        A choice that is carried out counts no more, and that for later containers is still to be followed.
        """
        chosen = {f"{HINT}{places(pod.containers).index(container)}": ",".join(map(str, indices))}
        self.annotate(pod, {**chosen, ASSIGNED: "true"} if last else chosen)

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """The pod is to have these annotations."""

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
        """Something happened to the pod; the caller logs it. `key`: said once, see `EventRecorder`."""
