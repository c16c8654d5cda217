"""A real Prometheus scrapes a simulated node in three modes: every query returns data, every alert fires."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml

from agent.model.demand import VGPU
from agent.mps import processes
from agent.mps.directories import Directories
from agent.nvml.errors import NvmlCode
from agent.simulator import events
from agent.simulator.kubelet.pods import ContainerSpec, PodSpec
from agent.status import client
from agent.web.control import NAME
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import Prometheus, prometheus
from tests.prometheus_binaries import programs
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.modes import LAYOUTS
from tests.scenarios.monitoring import MODES, Work

Fault = Callable[[], object]


def promtool(*arguments: str, text: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [programs() / "promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("path", queries.RULES, ids=lambda path: path.stem)
def test_promtool_accepts_the_rules(path: Path) -> None:
    code, told = promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))
    assert code == 0, told


def test_every_alert_tells_what_and_where() -> None:
    text = next(path for path in queries.RULES if path.stem == "alerts").read_text()
    alerts = re.split(r"- alert: ", text)[1:]
    assert {each.split()[0] for each in alerts} == set(queries.named("alert"))
    for each in alerts:
        assert re.search(r"severity: (Critical|High|Medium|Low)}", each)
        assert "summary:" in each
        assert "description:" in each
        assert "$labels.node" in each or "$labels.namespace" in each


def test_a_taint_that_stays_is_told_of(tmp_path: Path) -> None:
    """GPUSchedulingHeld: node a is stuck, b switches for a while, c has somebody else's taint."""
    taint = "kube_node_spec_taint"
    ours = 'key="gpu-node-agent.io/switching", effect="NoSchedule"'
    alert = "GPUSchedulingHeld"
    rule = rule_of(alert)
    told = {key: text.replace("{{ $labels.node }}", "a") for key, text in rule["annotations"].items()}
    firing = {"exp_labels": {**rule["labels"], "node": "a"}, "exp_annotations": told}
    unit = {
        "rule_files": [str(path) for path in queries.RULES],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    # kube-state-metrics has restarted: its second instance tells of the same node.
                    {"series": f'{taint}{{node="a", instance="1", {ours}}}', "values": "1x14 stale"},
                    {"series": f'{taint}{{node="a", instance="2", {ours}}}', "values": "_x13 1x40"},
                    {"series": f'{taint}{{node="b", instance="1", {ours}}}', "values": "1x16 stale"},
                    {"series": f'{taint}{{node="c", instance="1", key="other"}}', "values": "1x60"},
                ],
                "alert_rule_test": [
                    {"eval_time": "9m", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "12m", "alertname": alert, "exp_alerts": [firing]},
                    {"eval_time": "34m", "alertname": alert, "exp_alerts": []},
                ],
            }
        ],
    }
    check(unit, tmp_path)


def test_a_fault_of_mps_is_told_of(tmp_path: Path) -> None:
    """While it lasts, and for a quarter of an hour after one that was over between two scrapes."""
    alert, labels = "MPSFault", 'node="a", gpu="GPU-1"'
    rule = rule_of(alert)
    told = {
        key: text.replace("{{ $labels.node }}", "a").replace("{{ $labels.gpu }}", "GPU-1")
        for key, text in rule["annotations"].items()
    }
    firing = {"exp_labels": {**rule["labels"], "node": "a", "gpu": "GPU-1"}, "exp_annotations": told}
    lasting = {**firing, "exp_labels": {**firing["exp_labels"], "state": "fault"}}
    state = f'gpu_agent_mps_daemon_state{{{labels}, state="fault"}}'
    unit = {
        "rule_files": [str(path) for path in queries.RULES],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    {"series": state, "values": "0x9 1x3 0x100"},
                    {"series": f"gpu_agent_mps_faults_total{{{labels}}}", "values": "0x9 1x60 2x60"},
                ],
                "alert_rule_test": [
                    {"eval_time": "4m", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "6m", "alertname": alert, "exp_alerts": [lasting, firing]},
                    {"eval_time": "12m", "alertname": alert, "exp_alerts": [firing]},
                    {"eval_time": "30m", "alertname": alert, "exp_alerts": []},
                    {"eval_time": "37m", "alertname": alert, "exp_alerts": [firing]},
                ],
            }
        ],
    }
    check(unit, tmp_path)


def rule_of(alert: str) -> dict[str, Any]:
    """An alert as the chart ships it."""
    (rule,) = (
        each
        for path in queries.RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for each in group["rules"]
        if each.get("alert") == alert
    )
    found: dict[str, Any] = rule
    return found


def check(unit: object, folder: Path) -> None:
    """Have promtool run a unit test of rules."""
    path = folder / "unit.yaml"
    path.write_text(yaml.safe_dump(unit))
    code, answer = promtool("test", "rules", str(path))
    assert code == 0, answer


async def at_work(node: ModeNode) -> Work:
    """A pod in each mode with a process at work; a small one in vGPU that uses little of its memory."""
    work = Work(node)
    for mode in MODES:
        (pod,) = await node.run(mode, f"{mode}-busy")
        await work.start(pod, mode, 400, 30)
    for slot in range(8):
        node.rig.machine.load(slot, utilization=30 + slot, power_w=300, temperature_c=50)
    return work


# Proved by promtool: kube-state-metrics is not here, and no line in a log is a fault without an MPS server.
FROM_ELSEWHERE = {"GPUSchedulingHeld", "MPSFault"}


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

    return {
        "GPUUnhealthy": partial(machine.fall_off_bus, 2),
        "GPUXid": partial(machine.event, 1, events.XID, 13),
        "GPUUncorrectableMemoryErrors": partial(machine.ecc_double, 5),
        "GPUThermalSlowdown": hot_and_braked,
        "GPUPowerBrake": hot_and_braked,
        "MPSDaemonDown": daemon_down,
        "GPUFiguresMissing": partial(machine.fail, "nvmlDeviceGetUtilizationRates", NvmlCode.UNKNOWN, 4),
    }


@pytest.mark.timeout(150)
async def test_queries_return_data_and_each_alert_fires(tmp_path: Path) -> None:
    async with (
        embedded_rig() as rig,
        mode_node(
            rig,
            layouts=LAYOUTS,
            mps__probeSeconds=0.5,
            sampling__windowSeconds=5,
        ) as node,
        anyio.create_task_group() as group,
    ):
        port = await _port(node)
        async with prometheus(tmp_path, port, queries.rules()) as server:
            await node.want("mixed")
            await node.applied("mixed")
            work = await at_work(node)
            group.start_soon(work.run)
            await _check_page(node)
            await _check_top(node)
            await _check_data(server)
            assert await server.firing() <= {"GPUMemoryMostlyUnused"}, "alerts fire on a healthy node"
            await _check_alerts(server, node, rig)
        group.cancel_scope.cancel()


async def _port(node: ModeNode) -> int:
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
        *(expression for _, expression in queries.panels()),
        *(expression for _, expression in queries.variables()),
        *queries.documented(),
        *queries.named("record"),
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
    rest = ("GPUAllocationRefused", "GPUMemoryMostlyUnused")
    took = await server.wait([*made, *rest], fires, 30.0, "these alerts do not fire")
    await node.want("no-such-layout")
    took += await server.wait(["GPUModeSwitchBlocked"], fires, 15.0, "this alert does not fire")
    await anyio.to_thread.run_sync(partial(client.ask, node.folder / NAME, "release", seconds=60))
    took += await server.wait(["GPUAgentNotReady"], fires, 15.0, "this alert does not fire")
    await rig.kill_agent()
    took += await server.wait(["GPUAgentGone"], fires, 15.0, "this alert does not fire")
    told = {*made, *rest, "GPUModeSwitchBlocked", "GPUAgentNotReady", "GPUAgentGone"}
    assert told | FROM_ELSEWHERE == set(queries.named("alert")), "an alert has no fault that proves it"
    print(f"{len(told)} alerts fire, after {took:.1f} s")
