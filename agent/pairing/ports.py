"""What pairing needs of the outside: the node's pods, and somebody to tell."""

from collections.abc import Collection, Sequence
from typing import Protocol

import structlog

from agent.model.demand import Pod

log = structlog.get_logger()


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

    def chosen(self, pod: Pod, container: str, indices: Sequence[int]) -> None:
        """A container has its GPUs; to be written to the pod's annotations in the background."""


class LogRecorder:
    """Tells the log alone."""

    def refused(self, pod: Pod, message: str) -> None:
        """Logged by the socket's service already."""

    def hint_ignored(self, pod: Pod, message: str) -> None:
        """One warning."""
        log.warning("placement_hint_ignored", pod=f"{pod.namespace}/{pod.name}", reason=message)

    def chosen(self, pod: Pod, container: str, indices: Sequence[int]) -> None:
        """Nothing to write back."""
