"""The specs of the pods of this node."""

from collections.abc import Collection

from agent.model.pod import Pod


class PodsUnavailable(Exception):
    """A pod's spec cannot be read now; the text says why."""

    def __init__(self, message: str, *, away: bool = True) -> None:
        """`away`: the API server did not answer, as one that restarts; else it did, with nothing of use."""
        self.away = away
        super().__init__(message)


class PodSource:
    """Specs of the pods that are bound to this node. This one has no API server behind it."""

    answers = False  # whether one that cannot be read now may be read in a moment

    @property
    def node(self) -> str:
        """The node's name; empty: not known."""
        return ""

    def may_be_static(self, name: str) -> bool:
        """Whether a static pod of this node may have that name: the kubelet appends the node's."""
        return name.endswith(f"-{self.node.lower()}" if self.node else "")

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
        """This node's unfinished pods by the API server, as of now, in a second. Raises PodsUnavailable."""
        raise PodsUnavailable("the node's pods cannot be listed: the agent has no API server")
