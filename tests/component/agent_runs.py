"""The real program in a folder of its own, on a simulated machine, with or without an embedded kubelet."""

import json
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agent.simulator.machine import SimulatedMachine
from tests.cluster.agent_process import AgentProcess
from tests.pace import scaled


class Run:
    """One agent that can be started, asked and ended."""

    def __init__(self, folder: Path, name: str = "a", machine: SimulatedMachine | None = None) -> None:
        """Blocks. `machine`: None makes one; another agent's may be shared."""
        self.folder = folder
        home = folder / name
        home.mkdir()
        self.machine = machine or SimulatedMachine.create("dgx-h200", folder / "machine")
        self.process = AgentProcess(home, {}, lambda _: None, [f"--simulated-machine={folder / 'machine'}"])

    def settings(self) -> dict[str, object]:
        """The configuration of this node."""
        return {
            "defaultMode": "pgpu",
            "logging.format": "json",
            "http.address": "127.0.0.1",
            "http.port": 0,
            "cluster.access": "off",
            "kubelet.root": str(self.folder / "k"),
            "driver.root": str(self.folder),
            "host.state": str(self.folder / "state"),
            "host.run": str(self.folder / "run"),
            "host.cdi": str(self.folder / "cdi"),
        }

    async def start(self, more: Mapping[str, object] | None = None) -> None:
        """Start it; its HTTP server may not answer yet."""
        await anyio.to_thread.run_sync(self.process.start, self.settings() | dict(more or {}))

    async def stop(self, number: signal.Signals = signal.SIGTERM, deadline: float = 5.0) -> int | None:
        """Signal it; the exit code. TimeoutError when it does not end."""
        return await self.process.end(number, deadline)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Its log, or one kind of event. Blocks."""
        if not self.process.log.exists():
            return []
        whole = self.process.log.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if name in (None, line["event"])]

    async def logged(self, name: str, within: float = 10.0, count: int = 1) -> dict[str, Any]:
        """The newest event of that name, once there are `count` of them. TimeoutError with the log's end."""
        ended = False
        with anyio.move_on_after(scaled(within)):
            while True:
                found = await anyio.to_thread.run_sync(self.events, name)
                if len(found) >= count:
                    return found[-1]
                if ended:
                    break
                ended = self.process.pid is None  # look once more: it may have been its last word
                await anyio.sleep(0.02)
        text = await anyio.to_thread.run_sync(self.process.log_tail)
        how = "the agent ended without" if ended else f"{within:g} s passed without"
        raise TimeoutError(f"{how} {name}; the log ends in:\n{text}")

    async def exited(self, within: float = 15.0) -> int:
        """The exit code of an agent that ends by itself."""
        with anyio.fail_after(within):
            while self.process.pid is not None:
                await anyio.sleep(0.02)
        code = await self.process.end(signal.SIGTERM, 1)
        assert code is not None
        return code

    async def ask(self, path: str) -> tuple[int, str]:
        """GET from its HTTP server: status and body."""
        port = (await self.logged("http_listening"))["port"]

        def get() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=scaled(5)) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        return await anyio.to_thread.run_sync(get)

    async def ready(self, text: str, within: float = 10.0) -> tuple[int, str]:
        """Ask /readyz until its answer holds `text`."""
        answer = (0, "")
        with anyio.move_on_after(scaled(within)):
            while text not in answer[1]:
                answer = await self.ask("/readyz")
                await anyio.sleep(0.05)
            return answer
        raise TimeoutError(f"/readyz does not tell {text!r} within {within:g} s, but {answer}")


@asynccontextmanager
async def run_in(
    folder: Path, name: str = "a", machine: SimulatedMachine | None = None
) -> AsyncIterator[Run]:
    """An agent that is not started yet, and surely ended at the end."""
    one = await anyio.to_thread.run_sync(Run, folder, name, machine)
    try:
        yield one
    finally:
        with anyio.CancelScope(shield=True):
            await one.process.end(signal.SIGKILL, 5)
