"""Who uses each MPS server: clients mapped to pods, what is wrong among them, and their orderly end.

MPS fails open: a process that does not reach its daemon runs without limits (in compute mode
EXCLUSIVE_PROCESS it fails instead), so pods with shares and without a client are reported. Killing a client
in the middle of its work harms its neighbours, so clients of ending pods are asked to go first.

MPS of drivers before 580 has no multi-user server: the processes of a second user wait, without a word and
without a limit of time, until those of the first have all ended (NVIDIA's documentation on MPS, "Server").
"""

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent.holdings.process_owners import ProcessUnreadable, container_of_process
from agent.kit.tasks import Cell
from agent.model.cgroup import ContainerRef
from agent.model.holding import Record
from agent.mps import processes
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import DaemonStatus, EventReason, Reporter
from agent.mps.mps_errors import MpsError
from agent.mps.pods import Pods, share_holders

log = structlog.get_logger()

LOOK_SECONDS = 5.0
ENDING_LOOK_SECONDS = 0.5
TERMINATE_BEFORE_SECONDS = 2.0  # before the kubelet kills what is left
ENDED_SECONDS = 30.0  # after that its containers have ended, even if a finalizer keeps the pod
USERS_SECONDS = 30.0  # between two looks at the users of all containers with shares
QUIET_SECONDS = 120.0  # a pod that has had no client for so long is reported
MOST_NAMED = 5  # users of a pod: root in it may take any number
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MpsClient:
    pid: int  # on the host
    server: int
    root: bool  # it may open the control socket as the daemon's owner
    container: ContainerRef | None = None  # None: it is in no pod
    pod: str = ""  # namespace/name, where the pod is known


@dataclass(frozen=True, slots=True)
class Overview:
    """Clients of one GPU and what is wrong among them."""

    clients: tuple[MpsClient, ...] = ()
    silent: frozenset[str] = frozenset()  # pods that hold shares and have had no client for a while
    # Pods with several clients in a container: each of them has the container's whole cap ...
    crowded: frozenset[str] = frozenset()
    exceeding: frozenset[str] = frozenset()  # ... and those that together use more memory than that
    rooted: frozenset[str] = frozenset()  # pods whose clients run as root
    strangers: frozenset[int] = frozenset()  # PIDs of clients outside of pods, or whose pod holds no share
    # Pods, with their users, of which one must wait for another: the driver's MPS serves one user at a time.
    apart: frozenset[str] = frozenset()


# Pods (namespace/name) by UUID of the GPU of which they use more memory than their caps allow a process.
Exceeding = Callable[[], Mapping[str, AbstractSet[str]]]


@dataclass
class ClientWatch:
    """Keeps `overviews` true, by GPU UUID, and ends clients of dying pods."""

    manager: DaemonManager
    holdings: Cell[Record | None]
    pods: Pods
    exceeding: Exceeding
    report: Reporter
    overviews: Cell[Mapping[str, Overview]] = field(default_factory=lambda: Cell(MappingProxyType({})))
    proc: Path = PROC
    _seen: dict[tuple[str, str], float] = field(default_factory=dict)
    _ended: set[tuple[str, int]] = field(default_factory=set)
    _ending: set[str] = field(default_factory=set)  # GPUs whose clients are being ended
    _users: Mapping[str, frozenset[int]] = field(
        default_factory=dict
    )  # by container, as of the last look ...
    _users_looked: float = -USERS_SECONDS  # ... which was then
    _staying: set[str] = field(default_factory=set)  # pods (UID) that nobody deleted as of the last look
    _deadlines: dict[str, tuple[dt.datetime, float]] = field(default_factory=dict)

    async def run(self) -> None:
        self._ending.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_clients_of_dying_pods, group)
            while True:
                await self.look()
                await anyio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask every serving daemon for its clients and publish what is found."""
        found: dict[str, Overview] = {}
        exceeding, holders = self.exceeding(), self._holders()
        await self._look_at_users()
        for uuid, status in self.manager.statuses.value.items():
            if not status.serving:
                continue
            clients = await self._clients(uuid)
            judged = self._judged(uuid, clients, holders.get(uuid, frozenset()))
            found[uuid] = replace(
                judged, exceeding=frozenset(exceeding.get(uuid, ())), apart=self._apart(uuid, status)
            )
        before = self.overviews.value
        if found != before:
            self.overviews.publish(MappingProxyType(found))
            for uuid, overview in found.items():
                _log_changes(uuid, before.get(uuid, Overview()), overview)
                if overview.apart - before.get(uuid, Overview()).apart:
                    self.report(EventReason.USERS, uuid, _waiting(overview.apart), frozenset())

    async def _look_at_users(self) -> None:
        """See as whom containers with shares run, where that matters, and not at every look."""
        single = [uuid for uuid, each in self.manager.statuses.value.items() if each.multi_user is False]
        now = anyio.current_time()
        if not single or now - self._users_looked < USERS_SECONDS:
            return
        self._users_looked = now
        containers = {each for uuid in single for _, each in self._containers(uuid)}
        self._users = await anyio.to_thread.run_sync(users_of, containers, self.proc)

    def _apart(self, uuid: str, status: DaemonStatus) -> frozenset[str]:
        if status.multi_user is not False:
            return frozenset()
        holders = ((pod, self._users.get(each, frozenset())) for pod, each in self._containers(uuid))
        return kept_apart(holders)

    def _containers(self, uuid: str) -> set[tuple[str, str]]:
        """Containers with shares of a GPU: pod (namespace/name) and ID."""
        pods = {pod.key: pod.containers for pod in self.pods()}
        return {
            (holder.pod, containers[holder.holding.container])
            for holder in share_holders(self.holdings.value).get(uuid, ())
            if holder.holding.container in (containers := pods.get(holder.pod, {}))
        }

    def _holders(self) -> dict[str, frozenset[str]]:
        """Pods (namespace/name) with shares, by UUID of the GPU."""
        # Plain init containers have no client once they have ended.
        return {
            uuid: frozenset(holder.pod for holder in holders if holder.holding.listed)
            for uuid, holders in share_holders(self.holdings.value).items()
        }

    async def _clients(self, uuid: str, fresh: bool = False) -> tuple[MpsClient, ...]:
        """Clients of a GPU as of its daemon's last probe, or asked now where `fresh`."""
        daemon = self.manager.daemon(uuid)
        server = self.manager.status(uuid).server
        if daemon is None or server is None:
            return ()
        pids = daemon.clients
        if fresh:
            try:
                pids = await daemon.control.client_pids(server)
            except MpsError as error:
                log.warning("mps_clients_unknown", gpu=uuid, problem=str(error))
        if not pids:
            return ()
        names = {pod.uid: pod.key for pod in self.pods()}
        return await anyio.to_thread.run_sync(self._described, pids, server, names)

    def _described(
        self, pids: tuple[int, ...], server: int, names: Mapping[str, str]
    ) -> tuple[MpsClient, ...]:
        found = []
        for pid in pids:
            try:
                container = container_of_process(pid, self.proc)
                root = processes.effective_user(pid, self.proc) == 0
            except (OSError, ProcessUnreadable):
                continue  # it has ended
            pod = names.get(container.pod_uid, "") if container else ""
            found.append(MpsClient(pid, server, root, container, pod))
        return tuple(found)

    def _judged(self, uuid: str, clients: tuple[MpsClient, ...], pods: frozenset[str]) -> Overview:
        now = anyio.current_time()
        together = Counter((client.pod, client.container) for client in clients)
        for client in clients:
            self._seen[uuid, client.pod] = now
        # A pod that the API server has not shown, as none is without it, may be any of those with shares.
        unknown = any(client.container and not client.pod for client in clients)
        for pod in pods:
            self._seen[uuid, pod] = now if unknown else self._seen.get((uuid, pod), now)
        for key in [key for key in self._seen if key[0] == uuid and key[1] not in pods]:
            del self._seen[key]
        return Overview(
            clients,
            silent=frozenset(pod for pod in pods if now - self._seen[uuid, pod] >= QUIET_SECONDS),
            crowded=frozenset(pod for (pod, _), count in together.items() if pod and count > 1),
            rooted=frozenset(client.pod for client in clients if client.pod and client.root),
            strangers=frozenset(
                client.pid
                for client in clients
                if client.container is None or (client.pod and client.pod not in pods)
            ),
        )

    async def _end_clients_of_dying_pods(self, group: TaskGroup) -> None:
        while True:
            # After a start a pod may be deleted before its daemon is taken up: its grace period is counted.
            if not self.manager.statuses.value and self.holdings.value is not None and not self._holders():
                self._staying.clear()  # nobody looks meanwhile
                self._ended.clear()
                await self.manager.statuses.wait_for(bool)
            due = self._due()
            holders = self._holders() if due else {}
            if not due:
                self._ended.clear()
            for uuid in self.manager.statuses.value if due else ():
                # GPUs do not wait for each other: ending a client waits for its kernels.
                if uuid not in self._ending and self._concerns(uuid, due, holders.get(uuid, frozenset())):
                    self._ending.add(uuid)
                    group.start_soon(self._end, uuid, frozenset(due))
            await anyio.sleep(ENDING_LOOK_SECONDS)

    def _due(self) -> dict[str, str]:
        """Pods (UID to namespace/name) whose time is nearly up, or was a moment ago."""
        now, wall, pods = anyio.current_time(), dt.datetime.now(dt.UTC), self.pods()
        deadlines = {}
        for pod in pods:
            if pod.dies_at is not None:
                known, grace = self._deadlines.get(pod.uid), pod.grace_seconds
                left = (pod.dies_at - wall).total_seconds()
                if known and known[0] == pod.dies_at:
                    left = known[1] - now
                elif grace is not None:
                    # As the kubelet counts, from when it hears of it: the clocks here and there may differ.
                    left = grace if pod.uid in self._staying else min(left, grace)
                deadlines[pod.uid] = (pod.dies_at, now + left)
        self._deadlines = deadlines
        self._staying = {pod.uid for pod in pods if pod.dies_at is None}
        return {
            pod.uid: pod.key
            for pod in pods
            if pod.uid in deadlines
            and -ENDED_SECONDS <= deadlines[pod.uid][1] - now <= TERMINATE_BEFORE_SECONDS
        }

    def _concerns(self, uuid: str, due: Mapping[str, str], holders: frozenset[str]) -> bool:
        """Whether one of these pods (UID to name) has to do with a GPU: others' daemons are left alone."""
        if not holders.isdisjoint(due.values()):
            return True
        seen = self.overviews.value.get(uuid, Overview()).clients
        return any(client.container and client.container.pod_uid in due for client in seen)

    async def _end(self, uuid: str, due: frozenset[str]) -> None:
        """Terminate what clients of these pods there are now, once each."""
        try:
            daemon = self.manager.daemon(uuid)
            if daemon is None or not self.manager.status(uuid).serving:
                return
            for client in await self._clients(uuid, fresh=True):
                key = (uuid, client.pid)
                if client.container is None or client.container.pod_uid not in due or key in self._ended:
                    continue
                self._ended.add(key)
                try:
                    await daemon.control.terminate_client(client.server, client.pid)
                except MpsError as error:
                    log.warning("mps_client_not_terminated", gpu=uuid, pod=client.pod, problem=str(error))
                else:
                    log.info("mps_client_terminated", gpu=uuid, pod=client.pod, pid=client.pid)
        finally:
            self._ending.discard(uuid)


def _waiting(apart: frozenset[str]) -> str:
    return (
        f"pods {', '.join(sorted(apart))} run as different users, and MPS of this driver serves one user at "
        "a time: processes of one wait until those of another have ended; give pods that share a GPU one "
        "runAsUser, or use driver 580 or newer"
    )


def _log_changes(uuid: str, before: Overview, after: Overview) -> None:
    for pod in sorted(after.silent - before.silent):
        log.warning("mps_pod_without_client", gpu=uuid, pod=pod, quiet_seconds=QUIET_SECONDS)
    for pod in sorted(after.crowded - before.crowded):
        log.warning("mps_pod_with_many_clients", gpu=uuid, pod=pod)
    for pod in sorted(after.exceeding - before.exceeding):
        log.warning("mps_pod_above_its_cap", gpu=uuid, pod=pod)
    for pod in sorted(after.rooted - before.rooted):
        log.warning("mps_pod_runs_as_root", gpu=uuid, pod=pod)
    for pid in sorted(after.strangers - before.strangers):
        log.warning("mps_client_without_share", gpu=uuid, pid=pid)


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
