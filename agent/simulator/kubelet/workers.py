"""The pod workers: one task per admitted pod that starts its containers, and what the runtime has running."""

import math
import random
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from .api_server import Api, Pod
from .claims import ClaimManager
from .containers import ContainerRefused, ContainerView, Runtime
from .device_tables import CallFailed
from .devices import AdmissionRefused, DeviceManager
from .pod_specs import ContainerSpec, Phase
from .timings import Timings

logger = structlog.get_logger()


@dataclass
class Containers:
    """The runtime's memory: it outlives the kubelet. Keys are pod UID and container name."""

    views: dict[tuple[str, str], ContainerView] = field(default_factory=dict)
    _ends: dict[tuple[str, str], float] = field(default_factory=dict)  # when a process ends by itself

    def started(self, uid: str, container: ContainerSpec, view: ContainerView, *, ends: bool) -> None:
        """A container's process runs from now on, for ever unless it `ends` by itself."""
        self.views[uid, container.name] = view
        self._ends[uid, container.name] = anyio.current_time() + (container.seconds if ends else math.inf)

    def running(self, uid: str, name: str) -> bool:
        """Whether the container's process is there now."""
        return self._ends.get((uid, name), -math.inf) > anyio.current_time()

    async def ended(self, uid: str, name: str) -> None:
        """Wait until the process of a container that was started has ended."""
        # A kubelet may have ended before it had reported the end of a pod.
        await anyio.sleep_until(self._ends.get((uid, name), -math.inf))

    def end(self, uid: str) -> None:
        """End all processes of a pod; what its containers reported stays readable."""
        self._ends = {key: ends for key, ends in self._ends.items() if key[0] != uid}

    def forget(self, uid: str) -> None:
        """Kill and remove all containers of a pod."""
        self.end(uid)
        self.views = {key: view for key, view in self.views.items() if key[0] != uid}

    def reboot(self) -> None:
        """All processes end and all containers are gone, as after a reboot of the machine."""
        self._ends.clear()
        self.views.clear()


class PodWorkers:
    """Starts the containers of admitted pods, each pod on its own: a slow one holds up no other."""

    def __init__(
        self,
        group: TaskGroup,
        api: Api,
        devices: DeviceManager,
        claims: ClaimManager,
        runtime: Runtime,
        containers: Containers,
        timings: Timings,
        rng: random.Random,
    ) -> None:
        self._group = group
        self._api = api
        self._devices = devices
        self._claims = claims
        self._runtime = runtime
        self._containers = containers
        self._timings = timings
        self._rng = rng
        self._scopes: dict[str, anyio.CancelScope] = {}

    def start(self, pod: Pod) -> None:
        """Bring an admitted pod up in the background."""
        scope = self._scopes[pod.uid] = anyio.CancelScope()
        self._group.start_soon(self._run, pod, scope)

    def terminate(self, pod: Pod) -> None:
        """End the pod's worker and its containers."""
        if scope := self._scopes.pop(pod.uid, None):
            scope.cancel()
        self._containers.forget(pod.uid)

    async def unprepare(self, pod: Pod) -> None:
        """Give up the claims of a pod whose containers have ended, however many tries that takes."""
        while self._claims.holds(pod.uid):
            try:
                await self._claims.unprepare(pod.uid)
            except CallFailed as error:
                logger.info("unprepare_failed", pod=pod.spec.name, error=str(error))
                await anyio.sleep(self._jittered(self._timings.terminate_retry))

    async def _prepare(self, pod: Pod) -> None:
        """Wait until the pod's claims are prepared.

        An error ends the try and is dropped (kubernetes #139836): the next one comes with the pod's resync,
        or when somebody has changed the pod.
        """
        while True:
            seen = dict(pod.written)
            try:
                await self._claims.prepare(pod)
            except CallFailed as error:
                pod.claims_fault = f"Failed to prepare dynamic resources: prepare dynamic resources: {error}"
                logger.info("prepare_failed", pod=pod.spec.name, error=str(error))
            else:
                pod.claims_fault = ""
                return
            self._api.changed()
            with anyio.move_on_after(self._jittered(self._timings.resync)):
                while pod.written == seen:
                    await self._api.changes.wait_change(self._api.changes.version)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self._rng.random() / 2)

    async def _run(self, pod: Pod, scope: anyio.CancelScope) -> None:
        with scope:
            self._api.mirror_static_pods()
            if pod.claims and not any(uid == pod.uid for uid, _ in self._containers.views):
                await self._prepare(pod)
            for container in pod.spec.init_containers:
                if (pod.uid, container.name) not in self._containers.views:
                    await self._start(pod, container, ends=not container.restartable)
                if not container.restartable:
                    await self._containers.ended(pod.uid, container.name)
            for container in pod.spec.containers:
                if (pod.uid, container.name) not in self._containers.views:
                    await self._start(pod, container, ends=container.exits)
            self._set_phase(pod, Phase.RUNNING)
            if all(container.exits for container in pod.spec.containers):
                for container in pod.spec.containers:
                    await self._containers.ended(pod.uid, container.name)
                self._containers.end(pod.uid)
                await self.unprepare(pod)
                self._set_phase(pod, Phase.SUCCEEDED)

    async def _start(self, pod: Pod, container: ContainerSpec, *, ends: bool) -> None:
        pause = 0.0  # the first retry comes at once
        while True:
            try:
                await self._devices.pre_start(pod.uid, container)
                await self._allocate_what_is_missing(pod, container)
                responses = self._devices.responses(pod.uid, container.name)
                claimed = self._claims.cdi_devices(pod, container)
                view = await anyio.to_thread.run_sync(self._runtime.create, container, responses, claimed)
                await anyio.lowlevel.checkpoint_if_cancelled()  # the thread cannot be: its pod may be gone
            except (CallFailed, AdmissionRefused) as error:
                self._wait(pod, container, "CreateContainerConfigError", str(error))
            except ContainerRefused as error:
                self._wait(pod, container, "CreateContainerError", str(error))
            else:
                self._containers.started(pod.uid, container, view, ends=ends)
                pod.waiting = None
                self._api.changed()
                return
            await anyio.sleep(pause)
            pause = self._timings.container_retry

    async def _allocate_what_is_missing(self, pod: Pod, container: ContainerSpec) -> None:
        # A pod admitted before its resource was known: the kubelet asks from here, beside the sync loop, so
        # that two Allocates can overlap.
        held = self._devices.tables.pods.of_container(pod.uid, container.name)
        if any(n and r not in held and self._devices.tables.knows(r) for r, n in container.limits.items()):
            await self._devices.allocate(pod.spec, pod.uid, container, running=False)

    def _wait(self, pod: Pod, container: ContainerSpec, reason: str, message: str) -> None:
        pod.waiting = {container.name: (reason, message)}
        logger.info("container_waits", pod=pod.spec.name, container=container.name, reason=reason)
        self._api.changed()

    def _set_phase(self, pod: Pod, phase: Phase) -> None:
        if pod.phase is not phase:
            pod.phase = phase
            self._api.changed()
