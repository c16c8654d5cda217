"""Whether the driver itself can hold vGPU containers to their memory, and the CDI devices that have it do so.

An error of NVIDIA's hook keeps a container from starting: it is asked for only where driver, cgroups and MIG
mode are known to serve. Where the facts change the devices stay, since the kubelet repeats their names.
"""

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import repeat
from agent.model.demand import VGPU
from agent.nvml.port import FIRST_WITH_MEMORY_LIMITS
from agent.settings import HostSettings
from agent.vgpu import memory_limits
from agent.vgpu.driver import is_unified

log = structlog.get_logger()

RETRY_SECONDS = 10.0


class DriverFence:
    def __init__(self, host: HostSettings, inventory: Cell[Snapshot], injector: Injector) -> None:
        self._snapshot = inventory
        self._injector = injector
        self._cgroups = Path(host.cgroups)
        self._folder = Path(host.cdi)
        self._unified = False
        self._most_units = 0  # for which there are devices
        self._said: str | None = ""

    def obstacle(self, uuid: str) -> str | None:
        """Why the driver cannot limit containers on a GPU; None: it can."""
        if problem := self._node_obstacle():
            return problem
        state = self._snapshot.value.by_uuid.get(uuid)
        if state is None or state.gpu.mig_enabled:
            return f"GPU {uuid} is in MIG mode" if state else f"GPU {uuid} is not there"
        if not self._injector.limits_memory(uuid):
            return "containers get their GPUs without NVIDIA's hook for memory limits (own CDI specification)"
        if VGPU.blocks(state.gpu.memory_bytes) > self._most_units:
            return f"{memory_limits.FILE} has not been written yet"
        return None

    @property
    def holds(self) -> bool:
        """Whether every GPU of the node has it."""
        gpus = self._snapshot.value.gpus
        return bool(gpus) and not any(self.obstacle(each.uuid) for each in gpus)

    async def start(self) -> None:
        """Find out about the node, and write the devices where they are of use."""
        self._unified = await anyio.to_thread.run_sync(is_unified, self._cgroups, abandon_on_cancel=True)
        await self._keep()

    async def run(self, looked: Cell[Any]) -> None:
        """Keep the devices true to the GPUs, for ever. `looked` changes with how containers get GPUs."""

        async def keep() -> float | None:
            return None if await self._keep() else RETRY_SECONDS

        await repeat(keep, self._snapshot, looked)

    async def _keep(self) -> bool:
        """Whether the devices are as they should be."""
        gpus = [state.gpu for state in self._snapshot.value.gpus]
        most = max((VGPU.blocks(gpu.memory_bytes) for gpu in gpus), default=0)
        if most > self._most_units and self._node_obstacle() is None:
            try:
                await anyio.to_thread.run_sync(
                    memory_limits.write, self._folder, most, abandon_on_cancel=True
                )
            except OSError as error:
                log.error("memory_limits_not_written", folder=str(self._folder), problem=str(error))
                return False
            self._most_units = most
        problem = next((why for gpu in gpus if (why := self.obstacle(gpu.uuid))), None)
        if gpus and problem != self._said:
            self._said = problem
            log.info("driver_limits", armed=problem is None, problem=problem)
        return True

    def _node_obstacle(self) -> str | None:
        driver = self._snapshot.value.driver
        branch = driver.version.partition(".")[0] if driver else ""
        if not branch.isdecimal() or int(branch) < FIRST_WITH_MEMORY_LIMITS:
            version = driver.version if driver else "that is not known"
            return f"driver {version} has no memory limits: these take {FIRST_WITH_MEMORY_LIMITS} or newer"
        if not self._unified:
            return f"{self._cgroups} is not the root of cgroup v2, which the driver's limits take"
        return None
