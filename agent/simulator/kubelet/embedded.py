"""The embedded kubelet: a node in this process that plugins cannot distinguish from a real one.

It speaks real gRPC on unix sockets in a folder laid out like a kubelet's root. What it does and in which
order is kubelet 1.36's. What it leaves out: NUMA hints (topology policy `none`), CPU and memory, images,
probes, volumes, and any API server: pods are given to it directly, a small scheduler binds those without a
node name. After a reboot all containers start again, whatever the restart policy.
"""

import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from agent.kit.tasks import describe

from .api_server import Api, NodeObserver, Pod
from .containers import ContainerView, Runtime
from .devices import KubeletPanicked
from .life import SOCKET, Folders, Life, ListObserver, Machine
from .pod_specs import PodSpec
from .scheduler import Scheduler
from .timings import Timings
from .workers import Containers

logger = structlog.get_logger()
LONGEST_SOCKET_PATH = 107  # bytes, a limit of the kernel
Face = Literal["1.37", "1.36", "1.33"]


class EmbeddedKubelet:
    """A node of its own. Everything happens inside `running()`.

    `root` becomes the kubelet's root folder. `pod_resources_face`: "1.33" also lists finished pods, "1.37"
    knows v1 of the health of DRA devices.
    `status_tick`: seconds between copies of the device counts into the node's status. `seed` decides
    every random choice. `nvidia_nodes`: device node by GPU UUID, where the container runtime is to obey
    NVIDIA_VISIBLE_DEVICES as NVIDIA's does. `cdi_folder`: default `<root>/cdi`.
    """

    def __init__(
        self,
        root: Path,
        *,
        pod_resources_face: Face = "1.36",
        status_tick: float = 10.0,
        seed: int = 0,
        timings: Timings | None = None,
        cdi_folder: Path | None = None,
        nvidia_nodes: Mapping[str, str] | None = None,
        node_name: str = "simulated-node",
    ) -> None:
        rng = random.Random(seed)
        folders = Folders(root)
        longest = folders.device_plugins / ("x" * 40)
        if len(str(longest).encode()) > LONGEST_SOCKET_PATH:
            raise ValueError(f"{root}: too long for unix sockets below it; take a folder with a shorter path")
        self.api = Api(node_name, rng)
        self.panics: list[str] = []  # where a real kubelet would have crashed, in words
        self._machine = Machine(
            folders=folders,
            api=self.api,
            runtime=Runtime(cdi_folder or root / "cdi", nvidia_nodes),
            containers=Containers(),
            timings=replace(timings or Timings(), status_tick=status_tick),
            rng=rng,
            lists_finished_pods=pod_resources_face == "1.33",
            knows_health_v1=pod_resources_face == "1.37",
            on_list=[],
        )
        self.scheduler = Scheduler(self.api, self._machine.timings.scheduling)
        self._group: TaskGroup | None = None
        self._life: Life | None = None
        self._stopping = anyio.Event()
        self._ended = anyio.Event()

    @property
    def root(self) -> Path:
        """The kubelet's root folder."""
        return self._machine.folders.root

    @property
    def pod_resources_socket(self) -> Path:
        """Socket of PodResources."""
        return self._machine.folders.pod_resources / SOCKET

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """The node, up; on leaving, everything it started is gone. Not to be entered twice."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self.scheduler.run)
            await self.start()
            try:
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    await self.stop()
                group.cancel_scope.cancel()

    async def start(self) -> None:
        """Start the kubelet's process; return once its sockets serve."""
        if self._group is None:
            raise RuntimeError("enter running() first")
        self._stopping, self._ended = anyio.Event(), anyio.Event()
        await self._group.start(self._live)

    async def stop(self) -> None:
        """End the kubelet's process; pods run on. Sockets stay as files, connections drop."""
        if self._life is not None:
            self._stopping.set()
            await self._ended.wait()

    async def restart(self, down: float = 0.0, *, reboot: bool = False) -> None:
        """Stop, wait `down` seconds, start. `reboot`: the machine restarts, so that no container runs on."""
        await self.stop()
        if reboot:
            self._machine.containers.reboot()
        await anyio.sleep(down)
        await self.start()

    async def _live(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        started = False
        try:
            while not self._stopping.is_set():
                try:
                    async with Life.running(self._machine) as self._life:
                        if not started:
                            task_status.started()
                            started = True
                        await self._stopping.wait()
                except* KubeletPanicked as panics:
                    # Its supervisor (systemd) starts it again.
                    self.panics.append(describe(panics))
                    logger.error("kubelet_panicked", cause=self.panics[-1])
        finally:
            self._life = None
            self._ended.set()

    # The node

    @property
    def allocatable(self) -> Mapping[str, int]:
        """`status.allocatable` of the node."""
        return self.api.allocatable

    @property
    def capacity(self) -> Mapping[str, int]:
        """`status.capacity` of the node."""
        return self.api.capacity

    def known_devices(self, resource: str) -> int:
        """Devices that the kubelet itself knows as healthy; the node's status may have been patched ahead."""
        return len(self._life.devices.tables.healthy.get(resource, ())) if self._life else 0

    def device_health(self, driver: str, pool: str, device: str) -> tuple[int, str] | None:
        """Verdict (0 unknown, 1 healthy, 2 unhealthy) and message that a DRA driver gave of its device."""
        return self._life.drivers.health.get((driver, pool, device)) if self._life else None

    def observing_node(self, observer: NodeObserver) -> AbstractContextManager[None]:
        """Call `observer(capacity, allocatable)` at every change of the node's status."""
        return self.api.observing_node(observer)

    @contextmanager
    def observing_lists(self, observer: ListObserver) -> Iterator[None]:
        """Call `observer(resource, devices)` with every list message that a plugin sends."""
        self._machine.on_list.append(observer)
        try:
            yield
        finally:
            self._machine.on_list.remove(observer)

    # Pods

    def create_pod(self, spec: PodSpec) -> Pod:
        """Hand a pod to the API. Raises ValueError for a name that is taken."""
        return self.api.create(spec)

    async def delete_pod(self, spec: PodSpec, deadline: float = 30.0) -> None:
        """Delete a pod and wait until it is gone. Raises KeyError, TimeoutError."""
        pod = self.api.get(spec)
        self.api.delete(spec)
        await self.wait_for(
            lambda: pod not in (self.api.pods.get(spec.key), self.api.manifests.get(spec.key)),
            deadline,
            lambda: f"pod {spec.name} is still there",
        )

    def pod(self, spec: PodSpec) -> Pod:
        """The pod's object. Raises KeyError."""
        return self.api.get(spec)

    def container(self, spec: PodSpec, name: str) -> ContainerView:
        """The start parameters of a container. Raises KeyError if it never was."""
        return self._machine.containers.views[self.api.get(spec).uid, name]

    def runs(self, spec: PodSpec, name: str) -> bool:
        """Whether a container's process is there now. Raises KeyError for a pod that is not."""
        return self._machine.containers.running(self.api.get(spec).uid, name)

    async def wait_for(
        self, condition: Callable[[], bool], deadline: float, otherwise: Callable[[], str]
    ) -> None:
        """Wait until something about pods or node holds. Raises TimeoutError with `otherwise()`."""
        seen = self.api.changes.version
        with anyio.move_on_after(deadline):
            while not condition():
                await self.api.changes.wait_change(seen)
                seen = self.api.changes.version
            return
        raise TimeoutError(f"{otherwise()} after {deadline:g} s")
