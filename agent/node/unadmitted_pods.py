"""Pods that are bound to this node and do not have their devices yet."""

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet

from agent.model.holding import Record
from agent.model.pod import Pod

NOBODY: frozenset[tuple[str, str]] = frozenset()


async def unadmitted(
    pods: Callable[[], Mapping[str, Pod] | None],
    resources: Callable[[], AbstractSet[str]],
    refresh: Callable[[], Awaitable[Record | None]],
) -> frozenset[str]:
    """UIDs of pods that are bound to this node and lack any of `resources` that they ask for.

    `pods`: those bound here by UID, None: not known now. `refresh`: who holds what; where the kubelet does
    not say (None), each pod that waits to start counts as unadmitted: a kubelet that is too busy to answer is
    the very one that has not got to them yet.
    """

    def waiting() -> dict[str, Pod]:
        return {uid: pod for uid, pod in (pods() or {}).items() if pod.pending and pod.asks_for(resources())}

    if not waiting():
        return frozenset()
    listed = await refresh()
    held: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for one in listed.holdings if listed else ():
        held.setdefault((one.namespace, one.pod), set()).add((one.container, one.resource))
    # Once more, after the kubelet's answer: pods that were bound meanwhile are not in it.
    return frozenset(
        uid
        for uid, pod in waiting().items()
        if pod.lacks(resources(), held.get((pod.metadata.namespace, pod.metadata.name), NOBODY))
    )
