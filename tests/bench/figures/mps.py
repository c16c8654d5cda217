"""MPS: how long a daemon takes to serve, and the memory of an agent with everything on."""

import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import Assignment
from agent.mps import processes, shared_memory
from agent.mps.binary import Program
from agent.mps.compute_mode import ComputeModes
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import EventReason, Options
from agent.mps.directories import Directories
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.bench.conditions import Conditions, Node, short_folder
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.mps_binaries import SUITES, control_program

STARTS = 20
POD_SECONDS = 120.0
SETTLE_SECONDS = 10.0
CPU_SECONDS = 30.0
PGPU, VGPU, MPS = "nvidia.com/gpu", "tencent.com/vcuda", "nvidia.com/mps"
# One GPU for claims, one in ten slices, the others shared: all five resources; 100 pods hold nearly all.
LAYOUT = [
    {"gpus": ["0"], "mode": "dra"},
    {"gpus": ["1"], "mode": "pgpu", "replicas": 10},
    {"gpus": ["2-4"], "mode": "vgpu"},
    {"gpus": ["5-7"], "mode": "mps"},
]
VGPU_PODS, MPS_PODS, WHOLE_PODS = 45, 45, 10


def _silent(kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
    """Events go nowhere."""


@measurement(
    Figure("mps_daemon_start_ms", "ms", None, "set-up of a GPU until its daemon serves, p50; no MPS server"),
    Figure("mps_daemon_adopt_ms", "ms", None, "the same where the daemon runs already, p50"),
)
async def daemon_start(_: Conditions) -> Mapping[str, Taken]:
    """The real control daemon of the newest driver that is packaged; the server would need a GPU."""
    program = Program(await anyio.to_thread.run_sync(control_program, max(SUITES)))
    options = Options(cgroups=Path("/nonexistent"), prestart=False, quit_seconds=1)
    gpu = Gpu("GPU-5fd4f087-86f3-7a43-b711-4771313afc50", 0, 0, "0000:1b:00.0", "bench", 1 << 37, (9, 0))
    run = short_folder()
    starts: list[float] = []
    adoptions: list[float] = []
    for _number in range(STARTS):
        for taken in (starts, adoptions):
            manager = DaemonManager(run, lambda: program, ComputeModes(), _silent, options)
            async with anyio.create_task_group() as group:
                group.start_soon(manager.run, Cell(Assignment()))
                began = time.perf_counter()
                await manager.set_up(gpu)
                taken.append(1000 * (time.perf_counter() - began))
                if taken is adoptions:
                    await manager.tear_down(gpu)
                group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(shutil.rmtree, run)
    return {
        "mps_daemon_start_ms": Taken(percentile(starts, 0.5), STARTS),
        "mps_daemon_adopt_ms": Taken(percentile(adoptions, 0.5), STARTS),
    }


def _pods() -> list[PodSpec]:
    shares = [(VGPU, VGPU_PODS, 6, 37), (MPS, MPS_PODS, 6, 9)]
    pods = [PodSpec(f"whole-{number}", (ContainerSpec("main", {PGPU: 1}),)) for number in range(WHOLE_PODS)]
    for vendor, count, cores, memory in shares:
        name = vendor.rpartition("/")[2]
        limits = {f"{vendor}-core": cores, f"{vendor}-memory": memory}
        pods += [PodSpec(f"{name}-{number}", (ContainerSpec("main", limits),)) for number in range(count)]
    return pods


@asynccontextmanager
async def _everything(conditions: Conditions, mode: str = "everything") -> AsyncIterator[Node]:
    """A node in all modes at once, or in one, with the API."""
    program = await anyio.to_thread.run_sync(control_program, max(SUITES))
    extra = {
        "layouts.everything": LAYOUT,
        "defaultMode": mode,
        "dra.enabled": True,
        "timeSlicing.rename": False,
        "mps.controlProgram": str(program),
        "mps.prestartServer": False,
    }
    async with conditions.node(extra) as node:
        api = HttpApi(node.kubelet.api)
        async with api.serving():
            kubeconfig = node.folder / "kubeconfig"
            await anyio.to_thread.run_sync(api.write_kubeconfig, kubeconfig)
            node.agent.settings |= {
                "cluster.access": "required",
                "cluster.kubeconfig": str(kubeconfig),
                "cluster.nodeName": node.kubelet.api.node_name,
                "host.cgroups": str(node.folder / "no-cgroups"),
            }
            try:
                await node.agent.start()
                await node.agent.ready()
                yield node
            finally:
                with anyio.CancelScope(shield=True):
                    await node.agent.kill()
                    await anyio.to_thread.run_sync(_end_daemons, node)


def _end_daemons(node: Node) -> None:
    for uuid in node.machine.uuids:
        for process in processes.daemons(Directories.of(node.folder / "run", uuid).pipe):
            os.kill(process.pid, signal.SIGKILL)
        shared_memory.unmount(Directories.of(node.folder / "run", uuid).shm)


@measurement(
    Figure(
        "idle_cpu_mps_percent",
        "%",
        None,
        f"of one core, agent and its questions to 8 MPS daemons, no pod, over {CPU_SECONDS:g} s",
    )
)
async def idle_cpu_mps(conditions: Conditions) -> Mapping[str, Taken]:
    """Programs that the agent runs and has waited for count as its own."""
    async with _everything(conditions, "mps") as node:
        await anyio.sleep(SETTLE_SECONDS)
        before, began = _with_children(node), anyio.current_time()
        await anyio.sleep(CPU_SECONDS)
        used, passed = _with_children(node) - before, anyio.current_time() - began
        return {"idle_cpu_mps_percent": Taken(100 * used / passed, 1)}


def _with_children(node: Node) -> float:
    fields = Path(f"/proc/{node.agent.pid}/stat").read_text().rpartition(")")[2].split()
    own, children = (sum(map(int, fields[low : low + 2])) for low in (11, 13))
    del own  # counted to the nanosecond elsewhere
    return node.agent.cpu_seconds() + children / os.sysconf("SC_CLK_TCK")


@measurement(
    Figure(
        "resident_memory_everything_mib",
        "MiB",
        64,
        "RSS with all five resources, claims, MPS daemons, the API server, and 100 pods that hold nearly all",
    )
)
async def resident_memory_everything(conditions: Conditions) -> Mapping[str, Taken]:
    """The design's conditions; the real NVML adds about 13 MiB."""
    async with _everything(conditions) as node:
        pods = _pods()
        with anyio.fail_after(POD_SECONDS):
            for pod in pods:
                node.kubelet.create_pod(pod)
                while node.kubelet.pod(pod).phase is not Phase.RUNNING:
                    if node.kubelet.pod(pod).phase.finished:
                        raise RuntimeError(f"pod {pod.name}: {node.kubelet.pod(pod).message}")
                    await anyio.sleep(0.01)
        for _ in range(5):
            await node.agent.scrape()
        await anyio.sleep(SETTLE_SECONDS)
        return {"resident_memory_everything_mib": Taken(node.agent.resident_mib(), 1)}
