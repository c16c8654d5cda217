"""The agent's own CDI specification: what shares add to a container, in a way that a pod cannot undo.

The container runtime applies CDI edits after the pod's own environment, so limits given this way hold
whatever the pod sets. There is one device for each thing that a share can add (a GPU's daemon, 1..100
cores, each number of memory units), so the file changes only when GPUs do, and no admission waits for a disk.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.inventory.snapshot import Snapshot
from agent.kit import atomic_file
from agent.kit.cell import Cell
from agent.kit.follow import repeat
from agent.model.demand import CORES, MPS
from agent.model.ledger import PairMember
from agent.model.mount import Mount
from agent.model.mps_abilities import PIPE_DIRECTORY, limits

log = structlog.get_logger()

KIND = "gpu-node-agent.io/share"
FILE = "gpu-node-agent.json"
CDI_VERSION = "0.5.0"  # nothing newer is used, and old runtimes refuse newer files
RETRY_SECONDS = 10.0


def devices(member: PairMember, uuid: str, units: int) -> tuple[str, ...]:
    """Qualified names of what a member adds to a container."""
    if member is PairMember.MEMORY:
        return (f"{KIND}={_memory(units)}",)
    return (f"{KIND}={_daemon(uuid)}", f"{KIND}={_core(units)}")


def specification(mounts: Mapping[str, tuple[Mount, ...]], pipe: str, most_memory: int) -> dict[str, object]:
    """The file's content: `mounts` of each GPU's daemon by UUID, memory units up to `most_memory`."""
    found = [
        _device(_daemon(uuid), {PIPE_DIRECTORY: pipe}, folders) for uuid, folders in sorted(mounts.items())
    ]
    found += [_device(_core(number), limits(number, 0)) for number in range(1, CORES + 1)]
    found += [_device(_memory(number), limits(0, number)) for number in range(1, most_memory + 1)]
    return {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": found}


def write(folder: Path, content: Mapping[str, object]) -> None:
    """Put the file in place in one step. Blocks. Raises OSError."""
    atomic_file.write(folder, FILE, json.dumps(content, separators=(",", ":")).encode())


class ShareSpecificationKeeper:
    """Keeps the file true to the GPUs of the node, whatever mode they are in: a container that the kubelet
    restarts needs its devices at once, even while the agent itself is starting.
    """

    def __init__(
        self,
        folder: Path,
        inventory: Cell[Snapshot],
        changes: Cell[Mapping[str, Any]],
        mounts_of: Callable[[str], tuple[Mount, ...]],
        pipe: str,
        needed: Callable[[], bool],
    ) -> None:
        """`needed`: whether there may be shares; without, the folder is left alone: it may be read-only."""
        self._folder = folder
        self._inventory = inventory
        self._changes = changes
        self._mounts_of = mounts_of
        self._pipe = pipe
        self._needed = needed
        self._written: dict[str, object] | None = None

    async def run(self) -> None:
        """Write the file whenever its content changes, until cancelled."""

        async def keep() -> float | None:
            try:
                await self.keep()
            except OSError as error:
                log.error("cdi_specification_not_written", folder=str(self._folder), problem=str(error))
                return RETRY_SECONDS
            return None

        await repeat(keep, self._inventory, self._changes)

    async def keep(self) -> None:
        """Write the file now if it is not as it should be. Raises OSError."""
        if not self._needed():
            return
        gpus = [state.gpu for state in self._inventory.value.gpus]
        if not gpus:
            return  # not looked at yet: the file of the agent before is better than an empty one
        mounts = {gpu.uuid: self._mounts_of(gpu.uuid) for gpu in gpus}
        wanted = specification(mounts, self._pipe, max(MPS.blocks(gpu.memory_bytes) for gpu in gpus))
        if wanted != self._written:
            await anyio.to_thread.run_sync(write, self._folder, wanted)
            self._written = wanted


def _device(name: str, environment: Mapping[str, str], folders: tuple[Mount, ...] = ()) -> dict[str, object]:
    edits: dict[str, object] = {"env": [f"{key}={value}" for key, value in environment.items()]}
    if folders:
        edits["mounts"] = [
            {
                "hostPath": each.host_path,
                "containerPath": each.container_path,
                "options": ["ro" if each.read_only else "rw", "rbind", "nosuid", "nodev"],
            }
            for each in folders
        ]
    return {"name": name, "containerEdits": edits}


def _daemon(uuid: str) -> str:
    return f"mps-{uuid}"


def _core(number: int) -> str:
    return f"mps-core-{number}"


def _memory(number: int) -> str:
    return f"mps-memory-{number}"
