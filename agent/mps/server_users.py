"""Who uses an MPS server now, by the kernel and by the driver: its end is the end of their work."""

from collections.abc import Collection

import anyio.to_thread

from agent.mps import processes
from agent.mps.daemon_parts import DaemonParts
from agent.mps.mps_errors import MpsError
from agent.mps.processes import Process
from agent.mps.silent_peers import peers_of

MOST_NAMED = 10


async def use_of(parts: DaemonParts, servers: Collection[Process], known: Collection[int] = ()) -> str | None:
    """Why these servers are in use, or may be, in words; None: nobody uses them.

    `known` are PIDs of clients as the daemon last named them.
    """
    own = {each.pid for each in servers}
    own |= await anyio.to_thread.run_sync(_parents, servers)
    try:
        found = await anyio.to_thread.run_sync(_by_kernel, servers, known)
    except OSError as error:
        return f"who is connected to its server is not known: {error.strerror}"
    if found - own:
        return f"process {_named(found - own)} is a client of its server"
    try:
        users = await parts.compute.users(parts.publisher.uuid)
    except MpsError as error:
        return str(error)
    if users is None:
        return "the driver does not report who uses the GPU"
    if users - own:
        return f"process {_named(users - own)} uses the GPU"
    return None


def _parents(servers: Collection[Process]) -> frozenset[int]:
    """Their daemons: a driver since 580 has them load libcuda, too."""
    found = (processes.parent(each.pid) for each in servers)
    return frozenset(pid for pid in found if pid is not None)


def _by_kernel(servers: Collection[Process], known: Collection[int]) -> frozenset[int]:
    found = frozenset(known)
    for each in servers:
        try:
            found |= peers_of(each.pid)
        except ProcessLookupError:
            continue  # it has ended
    return processes.remaining(found)


def _named(pids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(pids)[:MOST_NAMED]))
