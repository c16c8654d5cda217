"""How a pod could get around limits that stand in files which the agent mounts into its containers.

Judged by its specification alone, as an admission policy would; reported, or refused by option. What root
in an unprivileged container can do to itself is not among it (docs/vgpu.md): that cannot be seen from here.
"""

from collections.abc import Collection, Iterator
from posixpath import normpath

from agent.cluster.api import ApiError
from agent.cluster.pods import PodCache
from agent.kubelet.wire import Reason, Refused
from agent.model.pod import VGPU, Pod, SecurityContext
from agent.settings import Settings
from agent.vgpu.library import IN_CONTAINER, PRELOAD_IN_CONTAINER

# Each of them is enough to unmount, or to reach the host.
CAPABILITIES = frozenset({"ALL", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO"})
MOST_NAMED = 4
LONGEST_NAME = 120
FILES = (PRELOAD_IN_CONTAINER, IN_CONTAINER)
# Beside the agent's own: from each of these a container can be made, or found, that no limit reaches.
FOLDERS = (
    "/etc/cdi",
    "/etc/containerd",
    "/etc/crio",
    "/etc/kubernetes",
    "/proc",
    "/run/containerd",
    "/run/crio",
    "/run/docker.sock",
    "/sys/fs/cgroup",
    "/var/lib/containerd",
    "/var/lib/containers",
)
UNKNOWN = "its specification cannot be read"


class Avoidance:
    """Looks at the pods of this node."""

    def __init__(self, settings: Settings, pods: PodCache | None) -> None:
        """`pods`: those of the node; None: there is no way to the Kubernetes API."""
        self._pods = pods
        self._refuses = settings.vgpu.avoidable_limits == "refuse"
        host = settings.host
        kubelet = (settings.kubelet.root, settings.device_plugins_folder)
        self._folders = (*FOLDERS, host.state, host.run, host.cdi, *map(str, kubelet))

    async def ways(self, pod: Pod, container: str) -> tuple[str, ...]:
        """How a pod could get around its limits, each in words. Raises Refused where none may."""
        found = await self._found(pod)
        if found and self._refuses:
            raise Refused(
                f"container {container} could get around the limit of its memory ({'; '.join(found)}), which "
                "vgpu.avoidableLimits refuses: leave that out, or ask for whole GPUs",
                Reason.INVALID,
            )
        return found

    async def _found(self, pod: Pod) -> tuple[str, ...]:
        if self._pods is None:
            return (UNKNOWN,)
        try:
            found = await self._pods.get(pod.namespace, pod.name)
        except ApiError:
            found = None
        if found is None or found.metadata.uid != pod.uid:
            return (UNKNOWN,)
        return ways_around(found, VGPU.memory, FILES, self._folders)


def ways_around(pod: Pod, resource: str, files: Collection[str], folders: Collection[str]) -> tuple[str, ...]:
    """Each in words; empty: none is seen.

    `files` are where containers that ask for `resource` have their limits mounted, `folders` those of the
    host that nobody else may change. For the host any container of the pod counts: it is one tenant's.
    """
    found: list[str] = ["the pod has hostPID"] if pod.spec.host_pid else []
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    for each in containers:
        found += [f"container {each.name} {why}" for why in _rights(each.security_context)]
    used = {mount.name for each in containers for mount in each.volume_mounts}
    for volume in pod.spec.volumes:
        if volume.host_path and volume.name in used and _meets(volume.host_path.path, folders):
            found.append(f"the pod mounts {volume.host_path.path[:LONGEST_NAME]} of the host")
    # A volume above a file is enough: another holder of it removes the file there, and the mount with it.
    found += [
        f"container {each.name} mounts a volume at {mount.mount_path[:LONGEST_NAME]}"
        for each in containers
        if resource in each.resources.limits
        for mount in each.volume_mounts
        if _meets(mount.mount_path, files)
    ]
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return tuple(found[:MOST_NAMED] + more)


def _rights(context: SecurityContext | None) -> Iterator[str]:
    if context is None:
        return
    if context.privileged:
        yield "is privileged"
    added = context.capabilities.add if context.capabilities else []
    # Runtimes take both spellings.
    for name in sorted({each.upper().removeprefix("CAP_") for each in added} & CAPABILITIES):
        yield f"has the capability {name}"


def _meets(path: str, others: Collection[str]) -> bool:
    """Whether a path is one of `others`, lies below one, or one below it."""
    mine = _plain(path)
    return any(
        mine in ("/", other) or mine.startswith(f"{other}/") or other.startswith(f"{mine}/")
        for other in map(_plain, others)
    )


def _plain(path: str) -> str:
    """Without dots and double slashes; /var/run is /run on the nodes of today."""
    plain = "/" + normpath(path).lstrip("/")
    return plain.removeprefix("/var") if plain == "/var/run" or plain.startswith("/var/run/") else plain
