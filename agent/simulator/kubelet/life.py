"""One life of the kubelet's process: from its start to its end everything here is in memory only."""

import asyncio
import os
import random
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent._proto.v1beta1 import Device

from .api_server import Api, Pod
from .claim_plugins import HEALTH_SERVICES, ClaimPlugins
from .claims import ClaimManager
from .containers import Runtime
from .device_tables import Tables
from .devices import AdmissionRefused, DeviceManager
from .grpc_peer import serving
from .pod_specs import Phase
from .podresources_server import PodResourcesServer
from .registration import Plugins, RegistrationServer
from .registry import DEVICE_PLUGIN, DRA_PLUGIN, RegistryWatcher
from .timings import Timings
from .workers import Containers, PodWorkers

logger = structlog.get_logger()
SOCKET = "kubelet.sock"
ListObserver = Callable[[str, list[Device]], None]


@dataclass(frozen=True, slots=True)
class Folders:
    """The kubelet's folders below its root."""

    root: Path

    @property
    def device_plugins(self) -> Path:
        """kubelet.sock, the plugins' own sockets, the checkpoint."""
        return self.root / "device-plugins"

    @property
    def registry(self) -> Path:
        """Sockets that the plugin manager watches."""
        return self.root / "plugins_registry"

    @property
    def pod_resources(self) -> Path:
        """The PodResources socket."""
        return self.root / "pod-resources"

    def prepare(self) -> None:
        """Make the folders; remove every SOCKET of the last life and of plugins, no file. Blocks."""
        for folder in (self.device_plugins, self.registry, self.pod_resources):
            folder.mkdir(parents=True, exist_ok=True)
        for entry in (*os.scandir(self.device_plugins), *os.scandir(self.pod_resources)):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink(missing_ok=True)


@dataclass(slots=True)
class Machine:
    """All that outlives the kubelet: the API's objects, the running containers, and settings."""

    folders: Folders
    api: Api
    runtime: Runtime
    containers: Containers
    timings: Timings
    rng: random.Random
    lists_finished_pods: bool
    knows_health_v1: bool
    on_list: list[ListObserver]


class Life:
    """A running kubelet."""

    def __init__(self, machine: Machine, group: TaskGroup) -> None:
        self._machine = machine
        self._group = group
        self._api = machine.api
        self._timings = machine.timings
        self._pods: dict[str, Pod] = {}  # taken up, by UID, in that order
        self._ending: set[str] = set()  # UIDs of those whose processes have still to end
        self._unpreparing: set[str] = set()  # UIDs of those that have still to give up their claims
        tables = Tables()
        self.devices = DeviceManager(
            machine.folders.device_plugins, machine.timings, machine.rng, self._active, tables
        )
        self._plugins = Plugins(group, tables, machine.timings, self._list_received)
        health = HEALTH_SERVICES[0 if machine.knows_health_v1 else 1 :]
        self.drivers = ClaimPlugins(group, machine.api, machine.timings, health)
        self._claims = ClaimManager(machine.folders.root, machine.api, self.drivers)
        self._registry = RegistryWatcher(
            machine.folders.registry,
            {DEVICE_PLUGIN: self._plugins, DRA_PLUGIN: self.drivers},
            group,
            machine.timings,
        )
        self._workers = PodWorkers(
            group,
            machine.api,
            self.devices,
            self._claims,
            machine.runtime,
            machine.containers,
            machine.timings,
            machine.rng,
        )
        self._to_save = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def running(cls, machine: Machine) -> AsyncIterator[Self]:
        """A kubelet that serves; at the end its connections drop at once, as those of a killed process."""
        await anyio.to_thread.run_sync(machine.folders.prepare)
        async with anyio.create_task_group() as group, AsyncExitStack() as stack:
            life = cls(machine, group)
            stack.callback(life._plugins.close)
            stack.callback(life.drivers.close)
            known = await life.devices.load()
            await life._claims.load()
            if not known:  # no checkpoint: the node is new, whatever the API remembers of it
                none = dict.fromkeys(machine.api.capacity, 0)
                machine.api.set_node_status(none, none)
            folders = machine.folders
            lister = PodResourcesServer(
                life.devices,
                life._claims,
                life._taken_up,
                machine.lists_finished_pods,
            )
            await stack.enter_async_context(serving(folders.pod_resources / SOCKET, lister))
            register = RegistrationServer(life._plugins, folders.device_plugins)
            await stack.enter_async_context(serving(folders.device_plugins / SOCKET, register))
            for task in (life._registry.run, life._sync, life._report, life._save):
                group.start_soon(task)

            def ready() -> bool:
                return life.devices.sources_ready

            group.start_soon(life._claims.reconcile, life._active_or_ending, ready)
            try:
                yield life
            finally:
                group.cancel_scope.cancel()

    def _active(self) -> set[str]:
        return {uid for uid, pod in self._pods.items() if not pod.phase.finished}

    def _active_or_ending(self) -> set[str]:
        return self._active() | self._unpreparing

    def _taken_up(self) -> list[Pod]:
        return list(self._pods.values())

    # Devices

    def _list_received(self, resource: str, devices: list[Device]) -> None:
        self.devices.list_received(resource, devices)
        for observer in tuple(self._machine.on_list):
            observer(resource, devices)
        self._to_save.set()

    async def _save(self) -> None:
        while True:
            await self._to_save.wait()
            self._to_save = anyio.Event()
            await self.devices.save()

    # Node status

    async def _report(self) -> None:
        with anyio.move_on_after(self._timings.first_status):
            await self._registry.first_pass_done.wait()
            while self.devices.tables.waits_for_a_list():
                await anyio.sleep(0.01)
        while True:
            self.report()
            await anyio.sleep(self._timings.status_tick)

    def report(self) -> None:
        """Copy the device counts into the node's status, as every tick does. Keys once there stay, with 0."""
        now, grace = self._timings.clock(), self._timings.endpoint_grace
        capacity, allocatable, dropped = self.devices.tables.capacity(now, grace)
        if dropped:
            self._to_save.set()
        total = self._api.capacity | capacity | dict.fromkeys(dropped, 0)
        self._api.set_node_status(total, total | allocatable)

    # Pods

    async def _sync(self) -> None:
        """The sync loop: pods one after another, oldest first; what one waits for all wait for.

        Static pods are known at once, those of the API server a while after the start: until then
        PodResources list none of them, whatever they hold (`kubelet.go`, `syncLoopIteration`).
        """
        for pod in tuple(self._api.manifests.values()):
            await self._take_up(pod)
        await anyio.sleep(self._timings.first_pods)
        while not self._api.reachable:
            await self._api.changes.wait_change(self._api.changes.version)
        while True:
            seen = self._api.changes.version
            self._drop_removed()
            for pod in self._api.pods_of_the_kubelet():
                # One that a kubelet before has still to end goes on being ended, and holds what it held.
                if pod.uid not in self._pods and (not pod.deleting or pod.phase is Phase.RUNNING):
                    await self._take_up(pod)
            self.devices.sources_ready = True
            for pod in self._api.pods_of_the_kubelet():
                if pod.deleting and self._has_ended(pod):
                    self._end(pod)
            self._api.mirror_static_pods()
            await self._api.changes.wait_change(seen)
            await anyio.sleep(self._timings.watch)

    def _drop_removed(self) -> None:
        """Know no more of pods that were deleted by force; their processes take their time to end.

        Removals come before additions (`pkg/kubelet/config/config.go`, `Merge`).
        """
        api = self._api
        for pod in self._taken_up():
            known = api.manifests if pod.spec.static else api.pods  # mirrors say nothing
            if pod.deleting and known.get(pod.spec.key) is not pod:
                del self._pods[pod.uid]
                left = pod.deleted_at + pod.spec.grace - anyio.current_time()
                self._unpreparing.add(pod.uid)
                asyncio.get_running_loop().call_later(max(0.0, left), self._end_removed, pod)

    def _end_removed(self, pod: Pod) -> None:
        self._unpreparing.discard(pod.uid)
        self._end(pod)

    def _end(self, pod: Pod) -> None:
        """End a deleted pod's processes; the object goes once its claims are unprepared."""
        self._workers.terminate(pod)
        if not self._claims.holds(pod.uid):
            self._remove(pod)
        elif pod.uid not in self._unpreparing and not self._group.cancel_scope.cancel_called:
            self._unpreparing.add(pod.uid)
            self._group.start_soon(self._unprepare, pod)

    async def _unprepare(self, pod: Pod) -> None:
        await self._workers.unprepare(pod)
        self._remove(pod)

    def _remove(self, pod: Pod) -> None:
        self._unpreparing.discard(pod.uid)
        self._pods.pop(pod.uid, None)
        self._api.remove(pod)

    def _has_ended(self, pod: Pod) -> bool:
        """Whether a deleted pod's processes have had their time to end; one that does not run needs none."""
        left = pod.deleted_at + pod.spec.grace - anyio.current_time()
        if left <= 0 or pod.phase is not Phase.RUNNING:
            return True
        if pod.uid not in self._ending:
            self._ending.add(pod.uid)
            asyncio.get_running_loop().call_later(left, self._api.changed)
        return False

    async def _take_up(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod
        if pod.phase.finished:
            return
        try:
            for container in (*pod.spec.init_containers, *pod.spec.containers):
                running = self._machine.containers.running(pod.uid, container.name)
                await self.devices.allocate(pod.spec, pod.uid, container, running)
        except AdmissionRefused as error:
            text = f"Allocate failed due to {error}, which is unexpected"
            self._reject(pod, "UnexpectedAdmissionError", text)
            return
        if short := self._misfit(pod):
            self._reject(pod, *short)
            return
        pod.admitted = True
        if not pod.deleting:
            self._workers.start(pod)

    def _misfit(self, pod: Pod) -> tuple[str, str] | None:
        """The kubelet's own fit check: totals again, but what is allocated already counts as allocatable."""
        for resource in pod.spec.resources:
            allocatable = self._api.allocatable.get(resource)
            if allocatable is None:
                continue  # unknown to the node: dropped from the pod before the check
            allocatable = max(allocatable, len(self.devices.tables.allocated.get(resource, ())))
            others = [self._pods[uid] for uid in self._active() if uid != pod.uid]
            used = sum(other.spec.request(resource) for other in others)
            if pod.spec.request(resource) > allocatable - used:
                return f"OutOf{resource}", (
                    f"Node didn't have enough resource: {resource}, requested: {pod.spec.request(resource)}, "
                    f"used: {used}, capacity: {allocatable}"
                )
        return None

    def _reject(self, pod: Pod, reason: str, message: str) -> None:
        pod.phase, pod.reason, pod.message = Phase.FAILED, reason, f"Pod was rejected: {message}"
        logger.info("pod_rejected", pod=f"{pod.spec.namespace}/{pod.spec.name}", reason=reason, error=message)
        self._api.changed()
