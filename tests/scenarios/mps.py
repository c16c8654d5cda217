"""MPS shares, from the daemons to what a container sees, with NVIDIA's real control daemon.

The MPS server needs a GPU, so none is pre-started; nothing here needs one.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import anyio.to_thread

from agent.kit import bounded
from agent.model.pod import MPS
from agent.mps import processes, shared_memory
from agent.mps.directories import Directories
from agent.nvml.port import ComputeMode
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.mps_binaries import SUITES, control_program
from tests.pace import scaled
from tests.scenarios.rig import Rig
from tests.scenarios.skeleton import running, unschedulable

CORE, MEMORY = MPS.core, MPS.memory
PERCENTAGE, LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"


def mps_pod(name: str, cores: int, memory: int, env: dict[str, str] | None = None) -> PodSpec:
    """A pod with one container that asks for a share."""
    return PodSpec(name, (ContainerSpec("main", {CORE: cores, MEMORY: memory}, env or {}),))


@dataclass
class MpsNode:
    """A node in mode MPS. `program` may be taken away and put back."""

    rig: Rig
    run: Path
    program: Path
    mode_file: Path

    async def settings(self, **more: Any) -> dict[str, Any]:
        return {
            **await self.rig.api_access(),
            "modeFile": str(self.mode_file),
            "host.run": str(self.run),
            # Daemons that a failed test leaves are ended by their folder; cgroups are not looked for.
            "host.cgroups": str(self.run / "no-cgroups"),
            "mps.controlProgram": str(self.program),
            "mps.prestartServer": False,
            "mps.probeSeconds": 0.5,
            **{key.replace("__", "."): value for key, value in more.items()},
        }

    async def pids(self) -> Mapping[str, int]:
        """The daemon of each GPU that has one."""

        def look() -> dict[str, int]:
            found = {}
            for uuid in self.rig.gpu_uuids():
                # A cluster has a PID namespace of its own.
                pipe = Directories.of(self.run, uuid).pipe
                daemons = (*processes.daemons(pipe), *processes.impostors(pipe))
                assert len(daemons) <= 1, f"two daemons on one pipe folder: {daemons}"
                if daemons:
                    found[uuid] = daemons[0].pid
            return found

        # A look at one that is late on a busy machine would count as no daemon.
        with patch.object(bounded, "SECONDS", scaled(30)):
            return await anyio.to_thread.run_sync(look)

    async def switch_off(self) -> None:
        """Take the mode away; return once no daemon is left."""
        await anyio.to_thread.run_sync(self.mode_file.write_text, "disable\n")
        with anyio.fail_after(30):
            while await self.pids():
                await anyio.sleep(0.05)

    def compute_modes(self) -> list[int]:
        """Of each GPU, as the driver has it."""
        return [int(self.rig.machine.gpu(uuid).compute_mode) for uuid in self.rig.gpu_uuids()]


@contextlib.asynccontextmanager
async def node_to_be(rig: Rig) -> AsyncIterator[MpsNode]:
    """Files of a node that will be in mode MPS. Ends all daemons at the end, by hand if need be."""
    folder = Path(await anyio.mkdtemp(prefix="gm-", dir=tempfile.gettempdir()))
    node = MpsNode(rig, folder, folder / "bin" / "nvidia-cuda-mps-control", folder / "mode")
    try:
        await anyio.to_thread.run_sync(_lay_out, node)
        yield node
    finally:
        with anyio.CancelScope(shield=True):
            for pid in (await node.pids()).values():
                os.kill(pid, signal.SIGKILL)
            await rig.kill_agent()
            for pid in (await node.pids()).values():
                os.kill(pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(remove_run_folder, folder)


def remove_run_folder(folder: Path) -> None:
    """Remove an agent's run folder, with the shared memory of daemons that outlived it. Blocks."""
    for shm in folder.glob("mps/*/shm"):
        shared_memory.unmount(shm)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def mps_node(rig: Rig, **settings: Any) -> AsyncIterator[MpsNode]:
    """The agent runs and offers every GPU as MPS shares."""
    async with node_to_be(rig) as node:
        await rig.start_agent(await node.settings(**settings))
        await rig.wait_allocatable(100 * len(rig.gpu_uuids()), CORE)
        yield node


def _lay_out(node: MpsNode) -> None:
    node.run.chmod(0o755)
    node.program.parent.mkdir()
    node.program.symlink_to(control_program(max(SUITES)))
    node.mode_file.write_text("mps\n")


def _break(program: Path) -> None:
    broken = program.with_name("broken")
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    broken.rename(program)


def _mend(program: Path) -> None:
    mended = program.with_name("mended")
    mended.symlink_to(control_program(max(SUITES)))
    mended.rename(program)


def gpu_of(ids: frozenset[str]) -> str:
    """The one GPU that all of these IDs are units of."""
    gpus = {each.partition("::")[0] for each in ids}
    assert len(gpus) == 1, f"units of several GPUs: {sorted(ids)}"
    return gpus.pop()


async def held_gpu(rig: Rig, pod: PodSpec) -> str:
    """The GPU of a pod's share, seen from both resources."""
    cores = await rig.held_ids(pod, "main", CORE)
    memory = await rig.held_ids(pod, "main", MEMORY)
    limits = pod.containers[0].limits
    assert (len(cores), len(memory)) == (limits[CORE], limits[MEMORY])
    return gpu_of(cores | memory)


async def test_mps_pods_get_exactly_their_caps(rig: Rig) -> None:
    async with mps_node(rig):
        # What a pod sets for itself must not undo its caps.
        contrary = {PERCENTAGE: "100", LIMIT: "0=900G,1=900G", PIPE: "/nowhere"}
        pods = [mps_pod("small", 15, 4, contrary), mps_pod("large", 60, 40), mps_pod("tiny", 1, 1, contrary)]
        await running(rig, pods)
        for pod in pods:
            limits = pod.containers[0].limits
            seen = await rig.container_environment(pod, "main")
            assert seen[PERCENTAGE] == str(limits[CORE])
            assert seen[LIMIT] == f"0={limits[MEMORY]}G"
            assert seen[PIPE] == "/run/gpu-node-agent/mps"
            uuid = await held_gpu(rig, pod)
            nodes = await rig.container_device_nodes(pod, "main")
            assert rig.device_node(uuid) in nodes
            assert not {rig.device_node(other) for other in rig.gpu_uuids() if other != uuid} & nodes


async def test_mps_pair_on_one_gpu(rig: Rig) -> None:
    async with mps_node(rig):
        shares = [(30, 40), (60, 10), (45, 90), (25, 5), (70, 60), (100, 139), (10, 100), (33, 33)]
        pods = [mps_pod(f"p{number}", *share) for number, share in enumerate(shares)]
        await running(rig, pods)
        used: dict[str, tuple[int, int]] = {}
        for pod, (cores, memory) in zip(pods, shares, strict=True):
            uuid = await held_gpu(rig, pod)
            before = used.get(uuid, (0, 0))
            used[uuid] = (before[0] + cores, before[1] + memory)
        blocks = {uuid: MPS.blocks(int(rig.machine.gpu(uuid).memory_total)) for uuid in rig.gpu_uuids()}
        assert all(cores <= 100 and memory <= blocks[uuid] for uuid, (cores, memory) in used.items())


async def test_mps_half_a_pair_is_refused(rig: Rig) -> None:
    async with mps_node(rig):
        pod = PodSpec("half", (ContainerSpec("main", {CORE: 20}),))
        whole = mps_pod("whole", 20, 1)
        await rig.create_pod(pod)
        await running(rig, [whole])
        # At admission where the agent sees specs, else at the container's start: it never runs.
        with anyio.move_on_after(5):
            while await rig.phase(pod) is Phase.PENDING:
                await anyio.sleep(0.1)
        assert await rig.phase(pod) in (Phase.PENDING, Phase.FAILED)


async def test_daemon_death_turns_ids_unhealthy_then_healthy(rig: Rig) -> None:
    async with mps_node(rig) as node:
        pod = mps_pod("survivor", 20, 2)
        await running(rig, [pod])
        uuid = await held_gpu(rig, pod)
        before = await node.pids()
        # While its program fails the daemon stays down. Were it missing, GPUs that nobody holds would leave
        # the mode, too, if the agent happened to look for it then.
        await anyio.to_thread.run_sync(_break, node.program)
        os.kill(before[uuid], signal.SIGKILL)
        total = 100 * len(rig.gpu_uuids())
        await rig.wait_allocatable(total - 100, CORE)
        assert await rig.capacity(CORE) == total
        await anyio.to_thread.run_sync(_mend, node.program)
        await rig.wait_allocatable(total, CORE, deadline=60.0)
        after = await node.pids()
        assert after[uuid] != before[uuid]
        assert {u: pid for u, pid in after.items() if u != uuid} == {
            u: pid for u, pid in before.items() if u != uuid
        }
        assert await rig.phase(pod) is Phase.RUNNING


async def test_agent_update_keeps_daemons_and_pods(rig: Rig) -> None:
    async with mps_node(rig) as node:
        pod = mps_pod("long", 50, 8)
        await running(rig, [pod])
        held = await rig.held_ids(pod, "main", CORE)
        before = await node.pids()
        assert len(before) == len(rig.gpu_uuids())
        for end in (rig.stop_agent, rig.kill_agent):
            await end()
            await rig.wait_allocatable(0, CORE)
            assert await node.pids() == before
            await rig.start_agent(await node.settings())
            await rig.wait_allocatable(100 * len(rig.gpu_uuids()), CORE)
            await running(rig, [second := mps_pod(f"after-{end.__name__.replace('_', '-')}", 10, 1)])
            assert await node.pids() == before
            assert await rig.phase(pod) is Phase.RUNNING
            assert await rig.held_ids(pod, "main", CORE) == held
            assert not await rig.held_ids(second, "main", CORE) & held


async def test_mps_switched_off_leaves_no_daemon_and_default_compute_mode(rig: Rig) -> None:
    async with mps_node(rig) as node:
        assert len(await node.pids()) == len(rig.gpu_uuids())
        assert set(node.compute_modes()) == {ComputeMode.EXCLUSIVE_PROCESS}
        await node.switch_off()
        await rig.wait_allocatable(0, CORE)
        with anyio.fail_after(10):
            while set(node.compute_modes()) != {ComputeMode.DEFAULT}:
                await anyio.sleep(0.05)
            # The folders go last: as long as one is there, the agent knows that something is left over.
            while await anyio.to_thread.run_sync(lambda: list(node.run.glob("mps/*/pipe"))):
                await anyio.sleep(0.05)


async def test_mps_sells_no_more_holders_than_clients_fit(rig: Rig) -> None:
    async with mps_node(rig, mps__mostClients=2):
        gpus = len(rig.gpu_uuids())
        pods = [mps_pod(f"p{number}", 5, 1) for number in range(2 * gpus)]
        for pod in pods:
            await running(rig, [pod])
        holders: dict[str, int] = {}
        for pod in pods:
            uuid = await held_gpu(rig, pod)
            holders[uuid] = holders.get(uuid, 0) + 1
        assert set(holders.values()) == {2}
        # 90 cores of each GPU are free, and no client may use them.
        await rig.wait_allocatable(10 * gpus, CORE)
        await rig.create_pod(over := mps_pod("over", 5, 1))
        await unschedulable(rig, over)


ALL = (
    test_mps_pods_get_exactly_their_caps,
    test_mps_pair_on_one_gpu,
    test_mps_half_a_pair_is_refused,
    test_daemon_death_turns_ids_unhealthy_then_healthy,
    test_agent_update_keeps_daemons_and_pods,
    test_mps_switched_off_leaves_no_daemon_and_default_compute_mode,
    test_mps_sells_no_more_holders_than_clients_fit,
)
