"""The composition root inside the test's own process: order of the stop, fatal tasks, no blocking call."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.app import run as app
from agent.app.agent import Agent
from agent.holdings import holdings
from agent.kit.tasks import FatalError
from agent.nvml.port import NvmlCode
from agent.settings import ClusterSettings, HostSettings, HttpSettings, Kubelet, Settings
from agent.simulator.kubelet import EmbeddedKubelet, Timings
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.whole.wing import PgpuPlugin
from tests.component.kubelet_room.parts import GPU, Peer, eventually, running_tasks


@pytest.fixture
def folder() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes, which pytest's folders may exceed."""
    made = Path(tempfile.mkdtemp(prefix="gna-"))
    yield made
    shutil.rmtree(made)


def _settings(folder: Path, **more: Any) -> Settings:
    return Settings(
        default_mode="pgpu",
        http=HttpSettings(address="127.0.0.1", port=0),
        kubelet=Kubelet(root=str(folder / "k")),
        cluster=ClusterSettings(access="off"),
        host=HostSettings(state=str(folder / "state"), run=str(folder / "run"), cdi=str(folder / "cdi")),
        **more,
    )


def _kubelet(folder: Path) -> EmbeddedKubelet:
    return EmbeddedKubelet(folder / "k", status_tick=0.05, timings=Timings(registry_poll=0.05))


def _nvml() -> SimulatedNvml:
    return SimulatedNvml(SimulatedMachine.create("dgx-h200"))


async def _get(agent: Agent, path: str) -> str:
    async with await anyio.connect_tcp("127.0.0.1", agent.core.http.port) as stream:
        await stream.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        data = b""
        with anyio.fail_after(5):
            while True:
                try:
                    data += await stream.receive()
                except anyio.EndOfStream:
                    return data.decode()


async def test_from_start_to_stop_nothing_blocks_the_loop_and_nothing_stays(folder: Path) -> None:
    """Blocking calls of agent code raise in every test; here all of its rooms run at once."""
    kubelet = _kubelet(folder)
    async with kubelet.running():
        tasks = running_tasks()
        async with app.running(_settings(folder), _nvml()) as agent:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
            assert "200 OK" in await _get(agent, "/readyz")
            assert "gpu_agent_" in await _get(agent, "/metrics")
            await anyio.sleep(0.5)
            failed = {name: state.last_error for name, state in agent.core.supervisor.states.items()}
            assert {name: error for name, error in failed.items() if error} == {}
        await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
        await eventually(lambda: running_tasks() <= tasks)
        assert not (folder / "k/plugins_registry/gna-nvidia-gpu.sock").exists()


async def test_without_an_api_server_a_pod_that_ended_under_a_stopped_kubelet_holds_nothing_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet names it in its checkpoint until the next writing, which no pod has to cause."""
    monkeypatch.setattr(holdings, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(holdings, "REWRITE_SECONDS", 0.1)
    monkeypatch.setattr(holdings, "REWRITE_LONGEST_SECONDS", 0.2)
    kubelet, pod = _kubelet(folder), PodSpec("a", (ContainerSpec("main", {GPU: 1}),))
    async with kubelet.running(), app.running(_settings(folder), _nvml()) as agent:
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        kubelet.create_pod(pod)
        await eventually(lambda: bool(agent.core.holdings.gpus_by_pod()))
        await kubelet.stop()
        kubelet.api.delete(pod)
        kubelet.api.pods.clear()
        await kubelet.start()
        await eventually(lambda: agent.core.holdings.problem is None)
        await eventually(lambda: not agent.core.holdings.gpus_by_pod())


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_node_without_a_driver_does_not_hold_up_a_rollout(folder: Path, hangs: bool) -> None:
    """The kubelet's readiness probe is about the agent; /readyz says what the node lacks."""
    machine = SimulatedMachine.create("dgx-h200")
    if hangs:
        machine.hang("nvmlInit")
    else:
        machine.fail("nvmlInit", NvmlCode.DRIVER_NOT_LOADED)
    async with _kubelet(folder).running(), app.running(_settings(folder), SimulatedNvml(machine)) as agent:
        with anyio.fail_after(10):
            while "200 OK" not in (answer := await _get(agent, "/readyz/agent")):
                await anyio.sleep(0.05)
        for each in (answer, node := await _get(agent, "/readyz")):
            assert ("NVML is not initialised yet" if hangs else "driver") in each
        assert "503" in node
        machine.clear_faults()


async def test_an_agent_that_the_kubelet_does_not_hear_holds_up_a_rollout(folder: Path) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running(), app.running(_settings(folder), _nvml()) as agent:
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        assert "200 OK" in await _get(agent, "/readyz/agent")
        await kubelet.stop()
        await eventually(lambda: agent.core.readiness.endpoints[0].blocker is not None)
        answer = await _get(agent, "/readyz/agent")
        assert "503" in answer
        assert "is not registered with the kubelet" in answer
        await kubelet.start()


async def test_new_holders_are_seen_without_the_timer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent answered the Allocate itself: nobody waits for its next look at the records."""
    monkeypatch.setattr("agent.holdings.holdings.REFRESH_SECONDS", 1e6)
    kubelet = _kubelet(folder)
    async with kubelet.running(), app.running(_settings(folder), _nvml()) as agent:
        await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
        for name in ("one", "two"):
            kubelet.create_pod(PodSpec(name, (ContainerSpec("main", {GPU: 1}),)))
            with anyio.fail_after(10):
                while f'pod="{name}"' not in await _get(agent, "/metrics"):
                    await anyio.sleep(0.1)


async def test_probes_answer_until_the_last_call_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The HTTP server goes last, so that the last scrape and the last probe tell why."""
    entered, go_on = anyio.Event(), anyio.Event()

    async def slow(self: PgpuPlugin, ids: Any) -> Any:
        entered.set()
        await go_on.wait()
        return await allocate(self, ids)

    allocate = PgpuPlugin.allocate
    monkeypatch.setattr(PgpuPlugin, "allocate", slow)
    answers: list[Any] = []
    kubelet = _kubelet(folder)
    async with kubelet.running(), anyio.create_task_group() as group:
        async with app.running(_settings(folder), _nvml()) as agent:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
            uuid = agent.core.inventory.snapshot.value.gpus[0].uuid
            peer = Peer(agent.core.readiness.endpoints[0].path)

            async def ask() -> None:
                answers.append(await peer.allocate(uuid))

            async def look() -> None:
                await eventually(lambda: agent.core.readiness.stopping)
                answers.append(await _get(agent, "/readyz"))
                go_on.set()

            group.start_soon(ask)
            await entered.wait()
            group.start_soon(look)
        await eventually(lambda: len(answers) == 2)
        await peer.close()
    assert "503" in answers[0]
    assert "the agent is stopping" in answers[0]
    assert answers[1].container_responses


async def test_a_fatal_task_ends_everything(folder: Path, monkeypatch: pytest.MonkeyPatch, logs: Any) -> None:
    kubelet = _kubelet(folder)
    async with kubelet.running():
        cut_off = False
        told = pytest.RaisesExc(ValueError, match="a fault of the reducer")
        with pytest.RaisesGroup(told, flatten_subgroups=True):
            async with app.running(_settings(folder), _nvml()) as agent:
                await eventually(lambda: kubelet.allocatable.get(GPU) == 8)
                monkeypatch.setattr("agent.inventory.actor.reduce", _stumble)
                try:
                    await anyio.sleep(10)
                finally:
                    cut_off = True
        assert cut_off
        assert agent.core.readiness.stopping
        await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
        assert not (folder / "k/plugins_registry/gna-nvidia-gpu.sock").exists()
    assert "fatal_task_failed" in [event["event"] for event in logs]


def _stumble(*_: object, **__: object) -> None:
    raise ValueError("a fault of the reducer")


async def test_a_start_that_is_told_to_stop_does(folder: Path) -> None:
    machine = SimulatedMachine.create("dgx-h200")
    machine.slow("nvmlInit", 300)
    stop = anyio.Event()
    async with anyio.create_task_group() as group:

        async def soon() -> None:
            await anyio.sleep(0.05)
            stop.set()

        group.start_soon(soon)
        with pytest.raises(app.StoppedEarly):
            async with app.running(_settings(folder), SimulatedNvml(machine), stop):
                raise AssertionError("it got no further")
        assert stop.is_set()


async def test_the_lock_is_given_back_when_a_start_fails(folder: Path) -> None:
    unreachable = Settings(
        http=HttpSettings(address="203.0.113.1", port=1),  # no address of this machine
        host=HostSettings(state=str(folder / "state"), run=str(folder / "run")),
    )
    for _ in range(2):
        with pytest.RaisesGroup(FatalError, flatten_subgroups=True):
            async with app.running(unreachable, _nvml()):
                raise AssertionError("it cannot run")
