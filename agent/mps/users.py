"""Users of the processes that share a GPU: without multi-user its server serves one of them at a time.

MPS of drivers before 580 has no multi-user server: the processes of a second user wait, without a word and
without a limit of time, until those of the first have all ended (NVIDIA's documentation on MPS, "Server").
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from agent.holdings.owners import ProcessUnreadable, container_of_process
from agent.mps import processes

MOST_NAMED = 5  # users of a pod: root in it may take any number


def users_of(containers: AbstractSet[str], proc: Path) -> Mapping[str, frozenset[int]]:
    """Users of the processes of these containers (IDs). Blocks: it looks at every process of the node."""
    found: dict[str, set[int]] = defaultdict(set)
    for folder in processes.folders(proc) if containers else ():
        try:
            container = container_of_process(int(folder.name), proc)
            if container and container.container_id in containers:
                found[container.container_id].add(processes.effective_user(int(folder.name), proc))
        except (OSError, ProcessUnreadable):
            continue  # it has ended
    return {container: frozenset(users) for container, users in found.items()}


def kept_apart(holders: Iterable[tuple[str, frozenset[int]]]) -> frozenset[str]:
    """Pods, with their users, of which one must wait for another: they have no user in common.

    `holders` are pods (namespace/name) with the users of a container's processes: of several, any may be the
    one that calls CUDA.
    """
    known = [(pod, users) for pod, users in holders if users]
    return frozenset(
        f"{pod} (user {_named(users)})"
        for pod, users in known
        if any(pod != other and users.isdisjoint(theirs) for other, theirs in known)
    )


def _named(users: frozenset[int]) -> str:
    more = ", ..." if len(users) > MOST_NAMED else ""
    return ", ".join(map(str, sorted(users)[:MOST_NAMED])) + more
