"""Which vGPU pods could get around their limits, by their specifications: reported, or refused by option."""

from agent.cluster.api import ApiError
from agent.cluster.pods import PodCache
from agent.kubelet.plugin_types import Reason, Refused
from agent.model.demand import VGPU, Pod
from agent.settings import Settings
from agent.vgpu.avoiding import ways_around
from agent.vgpu.library import IN_CONTAINER, PRELOAD_IN_CONTAINER

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
