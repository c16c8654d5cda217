"""The agent's own CDI specification: what shares add to a container, in a way that a pod cannot undo.

The container runtime applies CDI edits after the pod's own environment, so limits given this way hold
whatever the pod sets. There is one device for each thing that a share can add (a GPU's daemon, 1..100
cores, each number of memory units), so the file changes only when GPUs do, and no admission waits for a disk.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.injection.inject import VISIBLE_DEVICES
from agent.kit import files
from agent.kit.tasks import repeat
from agent.kubelet.wire import Mount
from agent.model import resource_claim as names
from agent.model.cuda import BELOW_NORMAL, CLIENT_PRIORITY, PIPE_DIRECTORY, limits
from agent.model.holding import PairMember
from agent.model.modes import Mode
from agent.model.pod import CORES, MPS
from agent.model.resource_claim import SHARE_KIND as KIND
from agent.model.resource_claim import ClaimedShare
from agent.modes.wing import Node
from agent.mps.daemon_manager import DaemonManager

log = structlog.get_logger()

FILE = "gpu-node-agent.json"
CDI_VERSION = "0.5.0"  # nothing newer is used, and old runtimes refuse newer files
RETRY_SECONDS = 10.0
# Where a container finds what its daemon has elsewhere on the host.
PIPE_IN_CONTAINER = "/run/gpu-node-agent/mps"
SHARED_MEMORY_IN_CONTAINER = "/dev/shm"  # noqa: S108  where libcuda looks


def devices(member: PairMember, uuid: str, units: int) -> tuple[str, ...]:
    """Qualified names of what a member adds to a container."""
    if member is PairMember.MEMORY:
        return (f"{KIND}={names.memory(units)}",)
    return (f"{KIND}={names.daemon(uuid)}", f"{KIND}={names.core(units)}")


def claimed(share: ClaimedShare) -> tuple[str, ...]:
    """Qualified names of what a claim's share adds to a container beside its GPU."""
    found = [names.daemon(share.gpu), names.core(share.cores), names.memory(share.memory)]
    if share.low_priority:
        found.append(names.LOW_PRIORITY)
    return tuple(f"{KIND}={each}" for each in found)


def specification(
    folders: Mapping[str, tuple[Mount, ...]], most_memory: int, *, simulated: bool = False
) -> dict[str, object]:
    """The file's content: mounts of each GPU's daemon by UUID, memory units up to `most_memory`."""
    found = [
        _device(names.daemon(uuid), {PIPE_DIRECTORY: PIPE_IN_CONTAINER}, each)
        for uuid, each in sorted(folders.items())
    ]
    found += [_device(names.core(number), limits(number, 0)) for number in range(1, CORES + 1)]
    found += [_device(names.memory(number), limits(0, number)) for number in range(1, most_memory + 1)]
    found.append(_device(names.LOW_PRIORITY, {CLIENT_PRIORITY: BELOW_NORMAL}))
    if simulated:  # they have no CDI device elsewhere
        found += [_device(names.visible(uuid), {VISIBLE_DEVICES: uuid}) for uuid in sorted(folders)]
    return {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": found}


def mounts(daemons: DaemonManager, uuid: str) -> tuple[Mount, ...]:
    """Mounts of its daemon's folders for a container.

    Sockets are connected to and the fifo is opened for writing where their folder is mounted read-only, too.
    """
    return (
        Mount(PIPE_IN_CONTAINER, daemons.pipe(uuid), read_only=True),
        Mount(SHARED_MEMORY_IN_CONTAINER, daemons.shared_memory(uuid), read_only=False),
    )


def write(folder: Path, content: Mapping[str, object]) -> None:
    """Put the file in place in one step. Blocks. Raises OSError."""
    files.write(folder, FILE, json.dumps(content, separators=(",", ":")).encode())


class ShareSpecificationKeeper:
    """Keeps the file true to the GPUs of the node, whatever mode they are in: a container that the kubelet
    restarts needs its devices at once, even while the agent itself is starting.
    """

    def __init__(self, node: Node, daemons: DaemonManager) -> None:
        self._node = node
        self._daemons = daemons
        self._folder = Path(node.settings.host.cdi)
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

        await repeat(keep, self._node.snapshot, self._daemons.statuses)

    async def keep(self) -> None:
        """Write the file now if it is not as it should be. Raises OSError."""
        if not self._node.allows(Mode.MPS):
            return  # nothing needs it, and the folder may be read-only
        gpus = [state.gpu for state in self._node.snapshot.value.gpus]
        if not gpus:
            return  # not looked at yet: the file of the agent before is better than an empty one
        folders = {gpu.uuid: mounts(self._daemons, gpu.uuid) for gpu in gpus}
        most, simulated = max(MPS.blocks(gpu.memory_bytes) for gpu in gpus), self._node.settings.simulator
        wanted = specification(folders, most, simulated=simulated.profile is not None)
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
