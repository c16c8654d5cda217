"""The device manager: which devices a container gets, and the calls to plugins that this takes.

Facts: kubelet 1.36, `pkg/kubelet/cm/devicemanager/manager.go`. The topology manager's policy is `none`, the
kubelet's default: no hints, so GetPreferredAllocation is asked with all free devices.
"""

import random
from collections.abc import Callable, Collection
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent._proto.v1beta1 import ContainerAllocateResponse, Device, DevicePluginOptions

from . import checkpoint_file
from .device_tables import Allocation, CallFailed, Endpoint, PluginCalls, Tables
from .pod_specs import ContainerSpec, PodSpec
from .timings import Timings

logger = structlog.get_logger()


class AdmissionRefused(Exception):
    """The devices of a container cannot be had; the text is the kubelet's."""


class KubeletPanicked(Exception):
    """A real kubelet would have crashed here (Go: nil pointer dereference)."""


class DeviceManager:
    """Devices of one life of the kubelet."""

    def __init__(
        self,
        folder: Path,
        timings: Timings,
        rng: random.Random,
        active_pods: Callable[[], Collection[str]],
        tables: Tables,
    ) -> None:
        self.tables = tables
        self._folder = folder
        self._timings = timings
        self._rng = rng
        self._active_pods = active_pods
        self._reusable: dict[str, dict[str, set[str]]] = {}
        self._checkpoint_lock = anyio.Lock()
        # False while a starting kubelet takes up the pods that were there before.
        self.sources_ready = False

    async def load(self) -> bool:
        """Read the checkpoint; whether there was one. Its resources count 0 until they register again.

        With one that it cannot read the real one goes on as if it held nothing (`manager.go`, `Start`).
        """
        try:
            found = await anyio.to_thread.run_sync(checkpoint_file.read, self._folder)
        except ValueError as error:
            logger.error("checkpoint_not_read", cause=str(error))
            return True
        if found is None:
            return False
        self.tables.pods, resources = found
        self.tables.allocated = self.tables.pods.in_use()
        for resource in resources:
            self.tables.healthy[resource] = set()
            self.tables.unhealthy[resource] = set()
            stopped = Endpoint(resource, None, DevicePluginOptions(), stopped_at=self._timings.clock())
            self.tables.endpoints[resource] = stopped
        return True

    def list_received(self, resource: str, devices: list[Device]) -> None:
        """A ListAndWatch message."""
        self.tables.replace_list(resource, devices)
        logger.debug("list_received", resource=resource, devices=len(devices))

    async def save(self) -> None:
        """Write the checkpoint."""
        async with self._checkpoint_lock:
            data = checkpoint_file.snapshot(self.tables.pods, self.tables.healthy)
            await anyio.to_thread.run_sync(checkpoint_file.write, self._folder, data)

    def free_inactive(self) -> None:
        """Free the devices of pods that run no more; the kubelet does so only when somebody looks."""
        if self.sources_ready:
            self.tables.free_inactive(self._active_pods())

    async def allocate(self, pod: PodSpec, uid: str, container: ContainerSpec, running: bool) -> None:
        """Devices for one container. `running`: its process survived a kubelet restart.

        Raises AdmissionRefused.
        """
        self._reusable = {uid: self._reusable.get(uid, {})}
        reusable = self._reusable[uid]
        await self._allocate_resources(uid, container, reusable, running)
        hand_on = container in pod.init_containers and not container.restartable
        for resource, allocation in self.tables.pods.of_container(uid, container.name).items():
            if hand_on:
                reusable[resource] = reusable.get(resource, set()) | allocation.ids
            else:
                reusable[resource] = reusable.get(resource, set()) - allocation.ids

    async def _allocate_resources(
        self, uid: str, container: ContainerSpec, reusable: dict[str, set[str]], running: bool
    ) -> None:
        limits = list(container.limits.items())
        self._rng.shuffle(limits)  # a Go map: another order for every container
        changed, freed = False, False
        for resource, needed in limits:
            if not self.tables.knows(resource):
                continue
            if not freed:
                self.free_inactive()
                freed = True
            already = self.tables.pods.of_container(uid, container.name).get(resource)
            held = already.ids if already else frozenset()
            if already and len(held) != needed:
                raise AdmissionRefused(
                    f'pod "{uid}" container "{container.name}" changed request for resource "{resource}" '
                    f"from {len(held)} to {needed}"
                )
            if running and not self.sources_ready:
                continue  # it has what it needs: it runs
            self._check_health(resource, held)
            if not already and needed:
                chosen = await self._choose(resource, needed, reusable.get(resource, set()))
                await self._call_allocate(uid, container.name, resource, chosen)
                changed = True
        if changed:
            await self.save()

    def _check_health(self, resource: str, held: frozenset[str]) -> None:
        healthy = self.tables.healthy.get(resource)
        if healthy is None:
            raise AdmissionRefused(f"cannot allocate unregistered device {resource}")
        if not healthy:
            raise AdmissionRefused(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        if not healthy >= held:
            raise AdmissionRefused(
                f"previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {resource}"
            )

    async def _choose(self, resource: str, needed: int, reusable: set[str]) -> set[str]:
        """IDs for a new allocation: handed-on ones first, then the plugin's preference, then any."""
        chosen: set[str] = set()

        def take(candidates: Collection[str]) -> bool:
            # The table may have been rebuilt by a PodResources call in the meantime.
            in_use = self.tables.allocated.setdefault(resource, set())
            for device in self._shuffled(set(candidates) - chosen)[: needed - len(chosen)]:
                in_use.add(device)
                chosen.add(device)
            return len(chosen) == needed

        if take(reusable):
            return chosen
        available = self.tables.healthy[resource] - self.tables.allocated.get(resource, set())
        missing = needed - len(chosen)
        if len(available) < missing:
            raise AdmissionRefused(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        preferred = await self._preferred(resource, available | chosen, chosen, needed)
        if take(preferred & available) or take(available):
            return chosen
        raise AdmissionRefused(
            f"unexpectedly allocated less resources than required. Requested: {needed}, Got: {len(chosen)}"
        )

    async def _preferred(
        self, resource: str, available: set[str], must_include: set[str], size: int
    ) -> set[str]:
        endpoint = self.tables.endpoints.get(resource)
        if endpoint is None:
            raise AdmissionRefused(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options.get_preferred_allocation_available:
            return set()
        try:
            calls = self._live(endpoint)
            answer = await calls.preferred(self._shuffled(available), self._shuffled(must_include), size)
        except CallFailed as error:
            raise AdmissionRefused(
                f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            ) from error
        return set(answer)

    async def _call_allocate(self, uid: str, container: str, resource: str, ids: set[str]) -> None:
        endpoint = self.tables.endpoints.get(resource)
        try:
            if endpoint is None:
                raise CallFailed(f"unknown Device Plugin {resource}")
            responses = await self._live(endpoint).allocate(self._shuffled(ids))
        except CallFailed as error:
            self.tables.allocated = self.tables.pods.in_use()
            raise AdmissionRefused(str(error)) from error
        if not responses:
            raise AdmissionRefused("no containers return in allocation response &AllocateResponse{}")
        self._insert(uid, container, resource, ids, responses[0])

    def _insert(
        self, uid: str, container: str, resource: str, ids: set[str], response: ContainerAllocateResponse
    ) -> None:
        by_numa: dict[int, list[str]] = {}
        for device in sorted(ids):
            try:
                nodes = self.tables.numa_of(resource, device)
            except KeyError as error:
                # manager.go looks the device up after the call and follows the pointer without a check.
                raise KubeletPanicked(
                    f"{device} left the list of {resource} while its Allocate was under way"
                ) from error
            for numa in nodes:
                by_numa.setdefault(numa, []).append(device)
        allocation = Allocation({numa: tuple(devices) for numa, devices in by_numa.items()}, response)
        self.tables.pods.insert(uid, container, resource, allocation)

    async def pre_start(self, uid: str, container: ContainerSpec) -> None:
        """PreStartContainer of every plugin that asks for it. Raises CallFailed."""
        limits = [resource for resource, amount in container.limits.items() if amount]
        self._rng.shuffle(limits)
        for resource in limits:
            if not self.tables.knows(resource):
                continue
            endpoint = self.tables.endpoints.get(resource)
            if endpoint is None:
                raise CallFailed(f"endpoint not found in cache for a registered resource: {resource}")
            if not endpoint.options.pre_start_required:
                continue
            allocation = self.tables.pods.of_container(uid, container.name).get(resource)
            if allocation is None:
                raise CallFailed(
                    f"no devices found allocated in local cache for pod {uid}, "
                    f"container {container.name}, resource {resource}"
                )
            try:
                await self._live(endpoint).pre_start(self._shuffled(allocation.ids))
            except CallFailed as error:
                raise CallFailed(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def responses(self, uid: str, container: str) -> list[ContainerAllocateResponse]:
        """The plugins' answers for a container, in random order: where they differ the first wins."""
        found = [each.response for each in self.tables.pods.of_container(uid, container).values()]
        self._rng.shuffle(found)
        return found

    def _live(self, endpoint: Endpoint) -> PluginCalls:
        if endpoint.calls is None or endpoint.stopped_at is not None:
            raise CallFailed(f"endpoint {endpoint.resource} has been stopped")
        return endpoint.calls

    def _shuffled(self, ids: Collection[str]) -> list[str]:
        ordered = sorted(ids)  # sets of text have another order in every process: the seed must decide alone
        self._rng.shuffle(ordered)
        return ordered
