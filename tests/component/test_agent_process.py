"""The whole program as its users meet it: starts, stops, messages and exit codes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.nvml.port import NvmlCode
from agent.simulator.kubelet import EmbeddedKubelet, Timings
from tests.component.agent_runs import run_in
from tests.component.kubelet_room.parts import GPU, eventually

SOCKET = "plugins_registry/gna-nvidia-gpu.sock"
FAST = Timings(registry_poll=0.05, first_status=0.2)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes, which pytest's folders may exceed."""
    made = Path(tempfile.mkdtemp(prefix="gna-"))
    yield made
    shutil.rmtree(made)


def _kubelet(folder: Path) -> EmbeddedKubelet:
    return EmbeddedKubelet(folder / "k", status_tick=0.05, timings=FAST)


def _program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GPU_NODE_AGENT")}
    return subprocess.run(
        [sys.executable, "-m", "agent", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_cleanly(folder: Path, number: signal.Signals) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), run_in(folder) as run:
        await run.start()
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        assert await run.ask("/readyz") == (200, "ready\n")
        assert await run.stop(number) == 0
        await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
        assert not (folder / "k" / SOCKET).exists()
        names = [line["event"] for line in run.events()]
        assert names.index("signal_received") < names.index("agent_stopping") < names.index("agent_stopped")
        assert not [line for line in run.events() if line["level"] in ("error", "critical")]


@pytest.mark.parametrize("call", ["nvmlDeviceGetUUID", "nvmlShutdown"])
async def test_a_hanging_driver_does_not_keep_it_from_ending(folder: Path, call: str) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), run_in(folder) as run:
        await run.start()
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        run.machine.hang(call)
        await anyio.sleep(0.1)
        try:
            assert await run.stop(deadline=5.5) == 0
        finally:
            run.machine.clear_faults()
        assert not (folder / "k" / SOCKET).exists()


async def test_a_driver_that_hangs_from_the_start_does_not_either(folder: Path) -> None:
    async with run_in(folder) as run:
        run.machine.hang("nvmlInit")
        await run.start()
        await run.logged("http_listening")
        assert (await run.ask("/healthz"))[0] == 200
        try:
            assert await run.stop(deadline=5.5) == 0
        finally:
            run.machine.clear_faults()


async def test_a_second_signal_ends_it_at_once(folder: Path) -> None:
    async with run_in(folder) as run:
        run.machine.hang("nvmlInit")
        await run.start()
        await run.logged("http_listening")
        process = run.process._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            assert await run.stop(signal.SIGINT) == 1
        finally:
            run.machine.clear_faults()
        assert [line["event"] for line in run.events()][-1] == "stopped_at_once"


async def test_a_hangup_does_not_end_it(folder: Path) -> None:
    async with run_in(folder) as run:
        await run.start()
        await run.logged("agent_started")
        process = run.process._process
        assert process is not None
        process.send_signal(signal.SIGHUP)
        assert (await run.logged("signal_received"))["signal"] == "SIGHUP"
        assert (await run.ask("/healthz"))[0] == 200
        assert await run.stop() == 0


async def test_killed_and_started_again_it_takes_its_place(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), run_in(folder) as run:
        for life in range(1, 3):
            await run.start()
            await run.logged("kubelet_listening", count=life)
            await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
            await run.stop(signal.SIGKILL)
            assert (folder / "k" / SOCKET).exists()
            await eventually(lambda: kubelet.allocatable.get(GPU) == 0)


# One agent only


async def test_a_second_agent_is_refused(folder: Path) -> None:
    async with run_in(folder) as first, run_in(folder, "b", first.machine) as second:
        await first.start()
        await first.logged("agent_started")
        await second.start()
        told = await second.logged("another_agent_is_there")
        assert f"process {first.process.pid}" in told["holder"]
        assert await second.exited(30.0) == 1
        (failure,) = second.events("agent_failed")
        assert "another agent serves this node" in failure["problem"]
        assert f"is held by process {first.process.pid}" in failure["problem"]
        assert "stop it first" in failure["problem"]
        assert "exception" not in failure
        assert await first.stop() == 0


async def test_a_second_agent_waits_for_the_first_to_leave(folder: Path) -> None:
    async with run_in(folder) as first, run_in(folder, "b", first.machine) as second:
        await first.start()
        await first.logged("agent_started")
        await second.start()
        await second.logged("another_agent_is_there")
        assert await first.stop() == 0
        await second.logged("agent_started")
        assert await second.stop() == 0


async def test_an_agent_that_waits_for_another_can_be_stopped(folder: Path) -> None:
    async with run_in(folder) as first, run_in(folder, "b", first.machine) as second:
        await first.start()
        await first.logged("agent_started")
        await second.start()
        await second.logged("another_agent_is_there")
        assert await second.stop(deadline=2) == 0
        assert await first.stop() == 0


# Configuration


def test_check_says_that_a_configuration_is_good(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("defaultMode: pgpu\n")
    run = _program("check", "--config", str(file))
    assert (run.returncode, run.stdout, run.stderr) == (0, "the configuration is good\n", "")
    named = _program("check", GPU_NODE_AGENT_CONFIG=str(file), GPU_NODE_AGENT_DEFAULT_MODE="mps")
    assert named.returncode == 0


@pytest.mark.parametrize("command", ["check", "run"])
def test_each_fault_of_a_configuration_is_told(tmp_path: Path, command: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("whenBusy: perhaps\nhttp: {port: 99999, colour: red}\n")
    run = _program(command, "--config", str(file), "--set", "logging.level=loud")
    assert (run.returncode, run.stdout) == (2, "")
    told = run.stderr.splitlines()
    assert len(told) == 4
    for line, parts in zip(
        told,
        [
            (str(file), "whenBusy", "drain"),
            (str(file), "http.port", "65535"),
            (str(file), "http.colour", "address"),
            ("--set logging.level=loud", "debug"),
        ],
        strict=True,
    ):
        assert all(part in line for part in parts)


def test_a_configuration_that_is_not_there() -> None:
    run = _program("run", "--config", "/nonexistent.yaml")
    assert run.returncode == 2
    assert run.stderr == "/nonexistent.yaml: cannot be read: No such file or directory\n"


def test_arguments_that_are_wrong() -> None:
    run = _program("rum")
    assert run.returncode == 2
    assert "invalid choice: 'rum'" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_version() -> None:
    run = _program("version")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip()


# What the node may lack


async def test_a_missing_library_is_told_and_taken_up_when_it_appears(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), run_in(folder) as run:
        run.machine.library_missing()
        await run.start()
        code, _ = await run.ready("the simulated node has no libnvidia-ml.so.1")
        assert code == 503
        assert (await run.ask("/healthz"))[0] == 200
        await run.logged("nvml_unavailable")
        run.machine.library_missing(missing=False)
        assert await run.ready("ready\n") == (200, "ready\n")
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        assert await run.stop() == 0


async def test_without_a_driver_the_real_binding_says_what_is_missing(folder: Path) -> None:
    async with run_in(folder) as run:
        run.process._arguments = ()  # no simulated machine
        await run.start()
        code, _ = await run.ready("libnvidia-ml.so.1 is neither below")
        assert code == 503
        assert await run.stop() == 0


async def test_a_gpu_that_cannot_be_described_hides_no_other(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), run_in(folder) as run:
        run.machine.fail("nvmlDeviceGetUUID", NvmlCode.UNKNOWN, gpu=2)
        await run.start()
        await eventually(lambda: kubelet.allocatable.get(GPU) == 7)
        told = await run.logged("gpu_unreadable")
        assert told["index"] == 2
        run.machine.clear_faults()
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        assert await run.stop() == 0


async def test_a_driver_that_does_not_fit_ends_it_with_the_reason(folder: Path) -> None:
    async with run_in(folder) as run:
        run.machine.driver_mismatch()
        await run.start()
        assert await run.exited() == 1
        (failure,) = run.events("agent_failed")
        assert "lib rm version mismatch" in failure["problem"].lower()
        assert "exception" not in failure


async def test_a_busy_port_ends_it_with_the_reason(folder: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        async with run_in(folder) as run:
            await run.start({"http.port": port})
            assert await run.exited() == 1
            (failure,) = run.events("agent_failed")
            assert failure["problem"] == (
                f"HTTP cannot listen on 127.0.0.1 port {port}: Address already in use; "
                "stop what holds it, or change http.address or http.port"
            )
            text = await anyio.to_thread.run_sync(run.process.log.read_text)
            assert "Traceback" not in text


async def test_a_run_folder_that_cannot_be_used_ends_it_with_the_reason(folder: Path) -> None:
    (folder / "run").write_text("a file")
    async with run_in(folder) as run:
        await run.start()
        assert await run.exited() == 1
        (failure,) = run.events("agent_failed")
        assert failure["problem"] == (
            f"host.run: {folder}/run cannot be used as the agent's run folder: File exists; "
            "make it writable for the agent, or name another folder"
        )


async def test_required_access_to_a_cluster_that_is_not_there(folder: Path) -> None:
    async with run_in(folder) as run:
        await run.start({"cluster.access": "required", "cluster.kubeconfig": "/nonexistent"})
        assert await run.exited() == 1
        (failure,) = run.events("agent_failed")
        assert failure["problem"].startswith("cluster.access is required, but kubeconfig /nonexistent")


async def test_a_machine_that_is_not_there(folder: Path) -> None:
    async with run_in(folder) as run:
        await anyio.to_thread.run_sync((folder / "machine").unlink)
        await run.start()
        assert await run.exited() == 1
        (failure,) = run.events("agent_failed")
        assert str(folder / "machine") in failure["problem"]


async def test_a_kubelet_that_was_never_there_and_comes(folder: Path) -> None:
    async with run_in(folder) as run:
        await run.start()
        code, _ = await run.ready("is the kubelet running")
        assert code == 503
        kubelet = _kubelet(folder)
        async with kubelet.running():
            await eventually(lambda: kubelet.allocatable.get(GPU) == 8, within=15)
            assert await run.ready("ready\n") == (200, "ready\n")
            assert await run.stop() == 0
