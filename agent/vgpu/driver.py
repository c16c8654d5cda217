"""The driver's own limits by cgroup: whether it can hold containers to their memory, and which are in force.

NVIDIA's hook sets them when a container is created, always to what it was admitted with (`agent.injection`);
from then on NVML reads and changes them. A container that restarts after a resize is given its cap here, too.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell, repeat
from agent.model.cgroup import container_of
from agent.model.pod import VGPU
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import FIRST_WITH_MEMORY_LIMITS, NvmlError, NvmlPort
from agent.settings import HostSettings
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import About
from agent.vgpu.limits import MEMORY_FILE, ContainerLimits, write_memory_devices
from agent.vgpu.room import Isolation

# Whether the driver itself can hold vGPU containers to their memory, and the CDI devices that have it do so.
#
# An error of NVIDIA's hook keeps a container from starting: it is asked for only where driver, cgroups and
# MIG mode are known to serve. Where the facts change the devices stay, since the kubelet repeats their names.

log = structlog.get_logger()

FENCE_RETRY_SECONDS = 10.0


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
            return f"{MEMORY_FILE} has not been written yet"
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
            return None if await self._keep() else FENCE_RETRY_SECONDS

        await repeat(keep, self._snapshot, looked)

    async def _keep(self) -> bool:
        """Whether the devices are as they should be."""
        gpus = [state.gpu for state in self._snapshot.value.gpus]
        most = max((VGPU.blocks(gpu.memory_bytes) for gpu in gpus), default=0)
        if most > self._most_units and self._node_obstacle() is None:
            try:
                await anyio.to_thread.run_sync(
                    write_memory_devices, self._folder, most, abandon_on_cancel=True
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


# Limits that the driver itself keeps, by cgroup: looked up once a container runs, and set at a resize.

RETRY_SECONDS = 5.0
# A container's cgroup comes soon after its ID; one that never comes is of a container that has ended.
MOST_TRIES = 6
# A container may make cgroups below its own, as deep as it likes.
DEEPEST, MOST_OF_A_CONTAINER = 12, 16


@dataclass(frozen=True, slots=True)
class _State:
    """The applied limit of a container, and its figures."""

    containers: frozenset[str]  # IDs: one that restarts has another
    memory_bytes: int
    tries: int = 0
    settled: bool = False


class DriverLimits:
    """Keeps the driver's limits as the limit folders have them."""

    def __init__(
        self,
        isolation: Isolation,
        nvml: tuple[NvmlPort, WorkerThread],
        cgroups: Path,
        containers_of: Callable[[About], Collection[str]],
        events: LimitEvents,
    ) -> None:
        """`containers_of`: the IDs that a container has at the runtime, without its scheme."""
        self._isolation = isolation
        self._nvml, self._thread = nvml
        self._cgroups = cgroups
        self._containers_of = containers_of
        self._events = events
        self._states: dict[str, _State] = {}
        self._problems: dict[str, str] = {}

    async def run(self, pods: Cell[Any]) -> None:
        """Follow containers with limits, and the node's pods, for ever."""

        async def look() -> float | None:
            return RETRY_SECONDS if await self.look() else None

        await repeat(look, pods, self._isolation.containers)

    async def look(self) -> bool:
        """Have the driver's limits be the containers'; whether something is to be tried again."""
        known = {key: each for key, each in self._isolation.containers.value.items() if each.about.driver}
        self._states = {key: each for key, each in self._states.items() if key in known}
        self._problems = {key: each for key, each in self._problems.items() if key in known}
        waits = False
        for key, limits in known.items():
            waits |= await self._keep(key, limits)
        return waits

    async def _keep(self, key: str, limits: ContainerLimits) -> bool:
        containers = frozenset(self._containers_of(limits.about))
        before = self._states.get(key)
        if before is None or (before.containers, before.memory_bytes) != (containers, limits.memory_bytes):
            before = _State(containers, limits.memory_bytes)
        if not containers or before.settled or before.tries == MOST_TRIES:
            return False
        try:
            limited = await self._set(limits, containers)
        except (NvmlError, OSError) as error:
            self._say(key, limits, f"{error}; the agent must be root, privileged, and see the host's cgroups")
            limited = None
        if limited is False:
            self._say(key, limits, "its cgroup has no limit, though NVIDIA's hook should have set one")
        elif limited:
            self._isolation.asked(key, True)
            self._problems.pop(key, None)
        # One without a limit gets none later: its hook has run.
        self._states[key] = _State(
            containers, limits.memory_bytes, before.tries + 1, settled=limited is not None
        )
        return limited is None

    async def _set(self, limits: ContainerLimits, containers: frozenset[str]) -> bool | None:
        """Whether the driver has the cap now; None: there is no cgroup of the container."""
        about = limits.about
        folders = await anyio.to_thread.run_sync(cgroups_of, self._cgroups, about.uid, containers)
        if not folders:
            return None
        limited = False
        for folder in folders:
            # Which of them the hook found its process in is the runtime's choice.
            now = await self._thread.run(self._nvml.memory_limit, about.gpu, folder)
            if now is None:
                continue
            limited = True
            if now != limits.memory_bytes:
                await self._thread.run(self._nvml.set_memory_limit, about.gpu, folder, limits.memory_bytes)
                log.info("driver_limit_set", pod=about.pod_key, bytes=limits.memory_bytes)
        return limited

    def _say(self, key: str, limits: ContainerLimits, problem: str) -> None:
        self._isolation.asked(key, False)
        if self._problems.get(key) != problem:
            self._problems[key] = problem
            self._events.not_limited(limits.about, problem)


def cgroups_of(root: Path, uid: str, containers: Collection[str]) -> list[Path]:
    """The cgroups of a pod's containers and those right below, highest first. Blocks. Raises OSError.

    Recognised by the kubelet's names (`agent.model.cgroup`): tenants make folders below theirs alone.
    """
    found: list[Path] = []
    level = [str(root)]
    for _ in range(DEEPEST):
        below: list[str] = []
        for folder in level:
            below += _folders(folder)
        if not below:
            break
        level = []
        for path in below:
            ref = container_of(f"0::{path[len(str(root)) :]}")
            if ref is None or not ref.container_id:
                level.append(path)
            elif ref.pod_uid == uid and ref.container_id in containers and len(found) < MOST_OF_A_CONTAINER:
                found.append(Path(path))
                found += [Path(each) for each in _folders(path)[: MOST_OF_A_CONTAINER - len(found)]]
    return found


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # it has ended meanwhile


def is_unified(cgroups: Path) -> bool:
    """Whether a folder is the root of cgroup v2, which the driver's limits take. Blocks."""
    return (cgroups / "cgroup.controllers").is_file()
