"""Takes the agent's traces off a Node object, for the clean-up."""

from collections.abc import Collection

import msgspec

from agent.cleanup.errors import CleanupFailed
from agent.cluster.api import ApiError, KubeApi
from agent.node import forget as node_object


async def forget(api: KubeApi, name: str, keep: Collection[str] = ()) -> None:
    """Remove everything that the agent wrote to the node but the annotations in `keep`.

    Again is nothing. Raises CleanupFailed.
    """
    try:
        await node_object.forget(api, name, keep)
    except (ApiError, msgspec.DecodeError) as error:
        raise CleanupFailed(f"node {name}: labels and condition cannot be removed: {error}") from error
