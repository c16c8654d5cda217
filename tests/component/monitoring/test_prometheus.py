"""A real Prometheus scrapes a simulated node in three modes: every query returns data, every alert fires."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.model.modes import SHARES, WHOLE_GPUS
from agent.model.pod import VGPU
from agent.mps import processes
from agent.mps.directories import Directories
from agent.nvml.port import NvmlCode
from agent.simulator import events
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.web import control
from agent.web.control import NAME
from agent.web.server import HttpRequest, HttpServer, Reply
from tests.component.dra.test_door import asking, device_class
from tests.component.dra.test_door import run as run_claimants
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import Prometheus, prometheus
from tests.component.monitoring.promtool import promtool
from tests.pace import scaled
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.monitoring import MODES, Work

Fault = Callable[[], object]
# A GPU, at least, of each mode.
LAYOUTS = {
    "mixed": [
        {"gpus": ["0-2"], "mode": "pgpu"},
        {"gpus": [3], "mode": "vgpu"},
        {"gpus": [4], "mode": "dra"},
        {"gpus": [5], "mode": "mig"},
        {"gpus": ["rest"], "mode": "mps"},
    ]
}


async def at_work(node: ModeNode) -> Work:
    """A pod in each mode with a process at work; a small one in vGPU that uses little of its memory."""
    work = Work(node)
    for mode in MODES:
        (pod,) = await node.run(mode, f"{mode}-busy")
        await work.start(pod, mode, 400, 30)
    for slot in range(8):
        node.rig.machine.load(slot, utilization=30 + slot, power_w=300, temperature_c=50)
    return work


# Proved by promtool (test_alert_rules.py): Paddle and the extender are not here, no pod reaches a limit or
# ends, and no line in a log is a fault without an MPS server.
FROM_ELSEWHERE = {
    "GPUAllocConflict",
    "GPUContainerOOMKilled",
    "GPUExtenderErrors",
    "GPUExtenderNotAsked",
    "GPUExtenderNotServing",
    "GPUExtenderRefusals",
    "GPUExtenderWatchStale",
    "GPUIdle",
    "GPUMemoryNearLimit",
    "GPUOutOfMemory",
    "GPUQuotaNearlyUsed",
    "GPUSchedulingHeld",
    "MPSFault",
}
# Proved by promtool, too (test_recording_rules.py): no container was resized here.
RULES_FROM_ELSEWHERE = {"namespace_resource:gpu_grown_units:sum"}
# Lists of what is wrong; test_fleet.py has something in each.
EMPTY_PANELS = {
    "GPU / Fleet: Nodes with unhealthy GPUs",
    "GPU / Fleet: Hardware Xids of a day",
    "GPU / Fleet: Switches under way, agents gone",
}
# A cluster as kube-state-metrics shows it: one node, quotas of the three modes, a pod that waits.
KUBE_STATE_METRICS = Path(__file__).with_name("kube_state_metrics.txt")


def faults(node: ModeNode, rig: EmbeddedRig) -> Mapping[str, Fault]:
    """How each alert's trouble is made."""
    machine, uuids = rig.machine, rig.gpu_uuids()

    def daemon_down() -> None:
        folders = Directories.of(node.folder, uuids[7])
        (daemon,) = processes.daemons(folders.pipe)
        folders.root.rename(folders.root.with_name("aside"))
        folders.root.touch()  # a file where its folder must be
        os.kill(daemon.pid, signal.SIGKILL)

    def hot_and_braked() -> None:
        machine.gpu(0).event_reasons = 0x40 | 0x80

    away = partial(machine.fall_off_bus, 2)  # with Xid 79
    return {
        "GPUUnhealthy": away,
        "GPUXid": away,
        "GPUApplicationXid": partial(machine.event, 1, events.XID, 13),
        "GPUUncorrectableMemoryErrors": partial(machine.ecc_double, 5),
        "GPUThermalSlowdown": hot_and_braked,
        "GPUPowerBrake": hot_and_braked,
        "MPSDaemonDown": daemon_down,
        "GPUFiguresMissing": partial(machine.fail, "nvmlDeviceGetUtilizationRates", NvmlCode.UNKNOWN, 4),
    }


@contextlib.asynccontextmanager
async def _node(library: Path) -> AsyncIterator[tuple[EmbeddedRig, ModeNode]]:
    """An instance on GPU 5, classes of devices for claims, and all that has figures switched on."""
    async with embedded_rig("1.37") as rig:
        rig.machine.set_mig(5, enabled=True)
        rig.machine.make_instance(5, "3g.71gb")
        for mode in (WHOLE_GPUS, SHARES):
            await rig.create_resource("DeviceClass", device_class(mode))
        async with mode_node(
            rig,
            layouts=LAYOUTS,
            dra__enabled=True,
            mps__probeSeconds=0.5,
            sampling__windowSeconds=5,
            sampling__activity=True,
            vgpu__enforcement="library",
            vgpu__compute="hard",
            vgpu__library=str(library),
        ) as node:
            yield rig, node


@pytest.mark.timeout(150)
async def test_queries_return_data_and_each_alert_fires(tmp_path: Path) -> None:
    library = anyio.Path(tmp_path) / "library.so"
    await library.write_bytes(b"\x7fELF")  # containers are shown it, and nobody loads it
    async with _node(Path(library)) as (rig, node), anyio.create_task_group() as group:
        port = await port_of(node)
        async with (
            page_of(KUBE_STATE_METRICS.read_text()) as others,
            prometheus(tmp_path, port, queries.rules("extender"), {"kube-state-metrics": others}) as server,
        ):
            await node.want("mixed")
            await node.applied("mixed")
            work = await at_work(node)
            group.start_soon(work.run)
            await run_claimants(rig, asking("claimant", SHARES, 30, 40))
            await _check_page(node)
            await _check_top(node)
            await _check_data(server)
            meant = {"GPUMemoryMostlyUnused", "GPUDemandUnsatisfied"}
            # A machine that stops for a moment misses scrapes, and that alert ends by itself.
            firing = await server.firing()
            with anyio.move_on_after(scaled(10)):
                while not firing <= meant:
                    await anyio.sleep(0.5)
                    firing = await server.firing()
            assert firing <= meant, "alerts fire on a healthy node"
            await _check_alerts(server, node, rig)
        group.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def page_of(text: str) -> AsyncIterator[int]:
    """Serve this page of metrics on loopback; the port."""
    server = HttpServer("127.0.0.1", 0)

    async def reply(_: HttpRequest) -> Reply:
        return Reply.text(text)

    server.add_route("/metrics", reply)
    async with anyio.create_task_group() as group:
        await group.start(server.serve)
        yield server.port
        group.cancel_scope.cancel()


async def port_of(node: ModeNode) -> int:
    """Where the node's agent serves its metrics."""
    with anyio.fail_after(10):
        while not (lines := await node.logged("http_listening")):
            await anyio.sleep(0.1)
    return int(lines[-1]["port"])


async def _check_page(node: ModeNode) -> None:
    _, text = await node.get("/metrics")
    code, told = await anyio.to_thread.run_sync(partial(promtool, "check", "metrics", text=text))
    assert code == 0, told


async def _check_top(node: ModeNode) -> None:
    command = [sys.executable, "-m", "agent", "top", f"--set=host.run={node.folder}"]
    with anyio.fail_after(15):
        while True:
            told = await anyio.run_process([*command, "--json"], cwd=queries.ROOT)
            containers = {each["pod"]: each for each in json.loads(told.stdout)["containers"]}
            if all(containers.get(f"{mode}-busy", {}).get("utilizationRatio") == 0.3 for mode in MODES):
                break
            await anyio.sleep(0.3)
    assert all(containers[f"{mode}-busy"]["memoryUsedBytes"] == 400 << 20 for mode in MODES)
    table = (await anyio.run_process([*command, "--once"], cwd=queries.ROOT)).stdout.decode()
    assert all(f"default/{mode}-busy" in table for mode in MODES)
    assert "NVIDIA H200" in table


async def _check_data(server: Prometheus) -> None:
    async def has_data(expression: str) -> Any:
        return await server.query(expression)

    wanted = [
        *(expression for title, expression in queries.panels() if title not in EMPTY_PANELS),
        *(expression for _, expression in queries.variables()),
        *queries.documented(),
        *(set(queries.named("record")) - RULES_FROM_ELSEWHERE),
    ]
    assert len(wanted) > 50
    took = await server.wait(wanted, has_data, 40.0, "these queries return nothing")
    print(f"{len(wanted)} queries return data, after {took:.1f} s")
    assert not await server.failed_rules()


async def _check_alerts(server: Prometheus, node: ModeNode, rig: EmbeddedRig) -> None:
    async def fires(name: str) -> bool:
        return name in await server.firing()

    made = faults(node, rig)
    for fault in dict.fromkeys(made.values()):
        await anyio.to_thread.run_sync(fault)
    alone = ContainerSpec("main", {VGPU.core: 150, VGPU.memory: 1})
    await node.create(PodSpec("impossible", (alone,), node_name="this one"))
    rest = ("GPUAllocationRefused", "GPUMemoryMostlyUnused", "GPUDemandUnsatisfied")
    took = await server.wait([*made, *rest], fires, 30.0, "these alerts do not fire")
    await node.want("no-such-layout")
    took += await server.wait(["GPUModeSwitchBlocked"], fires, 15.0, "this alert does not fire")
    await anyio.to_thread.run_sync(partial(control.ask, node.folder / NAME, "release", seconds=60))
    took += await server.wait(["GPUAgentNotReady"], fires, 15.0, "this alert does not fire")
    await rig.kill_agent()
    took += await server.wait(["GPUAgentGone"], fires, 15.0, "this alert does not fire")
    told = {*made, *rest, "GPUModeSwitchBlocked", "GPUAgentNotReady", "GPUAgentGone"}
    assert told | FROM_ELSEWHERE == set(queries.named("alert")), "an alert has no fault that proves it"
    print(f"{len(told)} alerts fire, after {took:.1f} s")
