"""The switcher's ports to other rooms; the composition root hands them over."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from agent.model.modes import Assignment


class Announcer(Protocol):
    """Keeps the scheduler from sending pods to what is about to go."""

    async def withdraw(self, ahead: Assignment, publish: Callable[[], Awaitable[None]]) -> None:
        """Call `publish`, which puts an assignment that offers less in force, when no pod is lost by it.

        Returns once the kubelet and the node's status have followed, or after a bounded time: neither an API
        server nor a kubelet that fails keeps `publish` from being called.
        """
