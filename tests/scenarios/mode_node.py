"""A node whose modes are switched by its label: what all scenarios of `modes.py` begin and end with."""

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent.model.pod import MPS, VGPU
from agent.modes.desired import LABEL
from agent.mps import processes
from agent.mps.directories import Directories
from agent.node.conditions import CONDITION, MODE_LABEL, STATE_ANNOTATION
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.mps_binaries import SUITES, control_program
from tests.pace import scaled
from tests.scenarios import agent_face, lists
from tests.scenarios.mps import remove_run_folder
from tests.scenarios.rig import GPU, Rig

GPUS = 8
SHARED = "nvidia.com/gpu.shared"
# A small share of each mode: several fit on one GPU.
REQUESTS: Mapping[str, Mapping[str, int]] = {
    "pgpu": {GPU: 1},
    "vgpu": {VGPU.core: 20, VGPU.memory: 50},
    "mps": {MPS.core: 20, MPS.memory: 4},
}
# The resource by which a mode's GPUs are counted here, and how many of it each GPU gives.
COUNTED: Mapping[str, tuple[str, int]] = {"pgpu": (GPU, 1), "vgpu": (VGPU.core, 100), "mps": (MPS.core, 100)}


def pod_of(mode: str, name: str) -> PodSpec:
    """A pod that asks for a little of what a mode offers."""
    return PodSpec(name, (ContainerSpec("main", REQUESTS[mode]),))


@dataclass
class ModeNode:
    """The agent on a node without a mode; only the node's label requests one."""

    rig: Rig
    folder: Path
    settings: dict[str, Any]
    record: Path
    pods: list[PodSpec] = field(default_factory=list)

    async def start(self, **more: Any) -> None:
        """Start the agent, with further settings (`timeSlicing__rename=True`)."""
        self.settings |= {key.replace("__", "."): value for key, value in more.items()}
        await self.rig.start_agent(self.settings)

    async def want(self, word: str | None) -> None:
        """Label the node."""
        await self.rig.set_labels({LABEL: word})

    async def state(self) -> Mapping[str, Any]:
        """The state annotation; empty before there is one."""
        found: dict[str, Any] = json.loads((await self.rig.node()).annotations.get(STATE_ANNOTATION, "{}"))
        return found

    async def reach(self, state: str, desired: str, deadline: float = 60.0) -> Mapping[str, Any]:
        """Wait until the node shows that state of that request."""
        seen: Mapping[str, Any] = {}
        with anyio.move_on_after(scaled(deadline)):
            while True:
                seen = await self.state()
                if (seen.get("state"), seen.get("desired")) == (state, desired):
                    return seen
                if not self.rig.agent_running():
                    break
                await anyio.sleep(0.1)
        log = await anyio.to_thread.run_sync(self.rig.agent_log().read_text)
        raise TimeoutError(f"not {state} {desired} after {deadline:g} s but {seen}; its log:\n{log[-3000:]}")

    async def applied(self, word: str, deadline: float = 60.0) -> None:
        """Wait until a mode is in force everywhere, by every place of the Node object."""
        await self.reach("applied", word, deadline)
        with anyio.fail_after(10):
            while True:
                node = await self.rig.node()
                told = node.conditions.get(CONDITION, ("", "", ""))[:2]
                if node.labels.get(MODE_LABEL) == word and told == ("True", "Applied"):
                    return
                await anyio.sleep(0.1)

    async def condition(self, status: str, reason: str) -> None:
        """Wait until the node's condition says so: it is written a moment after the annotation."""
        with anyio.fail_after(10):
            while (await self.rig.node()).conditions.get(CONDITION, ("", "", ""))[:2] != (status, reason):
                await anyio.sleep(0.1)

    async def offers(self, mode: str, gpus: int = GPUS, deadline: float = 60.0) -> None:
        """Wait until the node offers so many GPUs in a mode, and the kubelet with it."""
        resource, each = COUNTED[mode]
        await self.rig.wait_allocatable(gpus * each, resource, deadline)

    async def gone(self, resource: str) -> None:
        """Wait until the node shows no unit of a resource, offered or not."""
        with anyio.fail_after(15):
            while await self.rig.capacity(resource):
                await anyio.sleep(0.1)

    async def run(self, mode: str, *names: str) -> list[PodSpec]:
        """Create pods and wait until they run."""
        pods = [pod_of(mode, name) for name in names]
        for pod in pods:
            await self.create(pod)
        for pod in pods:
            await self.rig.wait_phase(pod, Phase.RUNNING, 60.0)
        return pods

    async def create(self, pod: PodSpec) -> None:
        """Hand a pod to the API."""
        self.pods.append(pod)
        await self.rig.create_pod(pod)

    async def end(self, *pods: PodSpec) -> None:
        """Delete pods and wait until they are gone."""
        for pod in pods:
            await self.rig.delete_pod(pod)
            self.pods.remove(pod)

    async def index_of(self, pod: PodSpec) -> int:
        """Index of the one GPU that a pod has units of."""
        resources = pod.containers[0].limits
        held = [await self.rig.held_ids(pod, "main", resource) for resource in resources]
        gpus = {text.partition("::")[0] for ids in held for text in ids}
        assert len(gpus) == 1, f"{pod.name} holds {held}"
        return self.rig.gpu_uuids().index(gpus.pop())

    async def logged(self, event: str) -> list[Mapping[str, Any]]:
        """All log lines of one event."""
        return await agent_face.logged(self.rig, event)

    async def get(self, path: str) -> tuple[int, str]:
        """One GET on the agent's HTTP port: status and text."""
        return await agent_face.page(self.rig, path)

    async def metric(self, pattern: str) -> float:
        """The sum of all samples whose name and labels match."""
        return await agent_face.metric(self.rig, pattern)

    async def check_lists(self, told: str = "") -> lists.Checked:
        """No GPU was ever on lists of two modes at once."""
        found = await anyio.to_thread.run_sync(lists.check, self.record)
        assert found.messages > 0
        assert not found.faults, f"{len(found.faults)} times, at first: {found.faults[:5]}"
        print(f"{told or 'lists'}: {found.messages} messages in {found.lives} lives, no GPU in two modes")
        return found


@contextlib.asynccontextmanager
async def mode_node(rig: Rig, **more: Any) -> AsyncIterator[ModeNode]:
    """A node with the agent and no mode. At the end every list message that it sent is checked."""
    folder = Path(await anyio.mkdtemp(prefix="gm-", dir=tempfile.gettempdir()))
    settings = {
        **await rig.api_access(),
        "defaultMode": "none",
        "host.run": str(folder),
        "mps.prestartServer": False,
    }
    try:
        settings["mps.controlProgram"] = str(await anyio.to_thread.run_sync(control_program, max(SUITES)))
        await anyio.to_thread.run_sync(folder.chmod, 0o755)
        node = ModeNode(rig, folder, settings, rig.record_lists())
        await node.start(**more)
        yield node
        await rig.kill_agent()
        await node.check_lists()
    finally:
        with anyio.CancelScope(shield=True):
            await rig.kill_agent()
            await anyio.to_thread.run_sync(_end_daemons, folder, rig.gpu_uuids())
            await anyio.to_thread.run_sync(remove_run_folder, folder)


def _end_daemons(folder: Path, uuids: tuple[str, ...]) -> None:
    """MPS daemons outlive their agent by design, but not their test."""
    for uuid in uuids:
        for each in processes.daemons(Directories.of(folder, uuid).pipe):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
