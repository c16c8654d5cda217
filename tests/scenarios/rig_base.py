"""The common part of both rigs: the agent's process, and the machine that it finds."""

import signal
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from agent.simulator.machine import SimulatedMachine
from tests.cluster.agent_process import AgentProcess


class RigBase:
    """Their part of `tests.scenarios.rig.Rig`."""

    def __init__(self, folder: Path, machine: SimulatedMachine, agent: AgentProcess) -> None:
        self._folder = folder
        self.machine = machine
        self.agent = agent
        self._minors = {uuid: int(machine.gpu(uuid).minor) for uuid in machine.uuids}

    def _settings(self) -> dict[str, object]:
        """The agent's, below what a scenario says: port and folders of its own, devices by CDI."""
        return {
            "defaultMode": "pgpu",
            "logging.format": "json",
            "http.address": "127.0.0.1",
            "http.port": 0,
            "driver.root": str(self._folder),
            "host.state": str(self._folder / "state"),
            "host.run": str(self._folder / "run"),
            # Plain runc ignores NVIDIA_VISIBLE_DEVICES, so nothing but CDI shows a GPU to a container.
            "injection.strategy": "cdi",
        }

    async def start_agent(self, settings: Mapping[str, object] | None = None) -> None:
        await anyio.to_thread.run_sync(self.agent.start, self._settings() | dict(settings or {}))

    async def kill_agent(self) -> None:
        await self.agent.end(signal.SIGKILL, 5)

    async def stop_agent(self, deadline: float = 10.0) -> int:
        code = await self.agent.end(signal.SIGTERM, deadline)
        if code is None:
            raise AssertionError("the agent was not started")
        return code

    def agent_running(self) -> bool:
        return self.agent.pid is not None

    def record_lists(self) -> Path:
        self.agent.record = self._folder / "lists"
        return self.agent.record

    def agent_log(self) -> Path:
        return self.agent.log

    def gpu_uuids(self) -> tuple[str, ...]:
        return self.machine.uuids

    def device_node(self, uuid: str) -> str:
        return f"/dev/nvidia{self._minors[uuid]}"
