"""Takes the agent's traces off a Node object, for the clean-up."""

import msgspec

from agent.cleanup.errors import CleanupFailed
from agent.cluster.api import ApiError, KubeApi
from agent.node import forget as node_object


async def forget(api: KubeApi, name: str) -> None:
    """Remove everything that the agent wrote to the node; again is nothing. Raises CleanupFailed."""
    try:
        await node_object.forget(api, name)
    except (ApiError, msgspec.DecodeError) as error:
        raise CleanupFailed(f"node {name}: labels and condition cannot be removed: {error}") from error
