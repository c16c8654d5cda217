"""What pairing needs of the outside, and how it says no."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Protocol

import structlog

from agent.kubelet.podresources import PodList
from agent.model.demand import Pod

log = structlog.get_logger()

LIST_SECONDS = 1.0  # of the two seconds that a call may take


class Cause(Enum):
    """Why a request is refused."""

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


class Record(Protocol):
    """Who holds what (`agent.kubelet.holdings`)."""

    async def look(self, deadline: float = LIST_SECONDS) -> PodList:
        """By a reading of this moment. Raises PodResourcesUnavailable."""


class PodsUnavailable(Exception):
    """A pod's spec cannot be read now; the text says why."""


class PodSource(Protocol):
    """Specs of the pods that are bound to this node."""

    def pods_on_node(self) -> Collection[Pod]:
        """The pods as last seen; never waits."""

    async def get(self, namespace: str, name: str) -> Pod | None:
        """One pod, asked anew, within a second; None: there is none. Raises PodsUnavailable."""


class NoPods:
    """A source without an API server behind it."""

    def pods_on_node(self) -> Collection[Pod]:
        """None are known."""
        return ()

    async def get(self, namespace: str, name: str) -> Pod | None:
        """Always unavailable."""
        raise PodsUnavailable(f"pod {namespace}/{name} cannot be read: the agent has no API server")


class Recorder(Protocol):
    """Tells pods' owners what happened; never waits."""

    def refused(self, pod: Pod, message: str) -> None:
        """A request of the pod was refused (event AllocationRefused)."""

    def hint_ignored(self, pod: Pod, message: str) -> None:
        """The scheduler's choice was not followed (event PlacementHintIgnored)."""

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        """A container has its GPUs; to be written to the pod's annotations in the background.

        `last`: no later container of the pod asks for GPUs of this pair.
        """

    def note(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """The pod is to have these annotations; to be written in the background."""

    def tell(self, pod: Pod, reason: str, message: str, *, warning: bool) -> None:
        """An event of the pod."""


class LogRecorder:
    """Tells the log alone."""

    def refused(self, pod: Pod, message: str) -> None:
        """Logged by the socket's service already."""

    def hint_ignored(self, pod: Pod, message: str) -> None:
        """One warning."""
        log.warning("placement_hint_ignored", pod=f"{pod.namespace}/{pod.name}", reason=message)

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        """Nothing to write back."""

    def note(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Nothing to write back."""

    def tell(self, pod: Pod, reason: str, message: str, *, warning: bool) -> None:
        """Logged by whoever tells it."""
