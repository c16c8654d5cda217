"""The agent's process under measurement: started, asked over HTTP, and read from /proc."""

import json
import signal
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread

from tests.cluster.agent_process import AgentProcess

READY_SECONDS = 30.0


class BenchAgent:
    """One agent on one node."""

    def __init__(self, process: AgentProcess, settings: Mapping[str, object]) -> None:
        self.process = process
        self.settings = dict(settings)
        self._port: int | None = None

    @property
    def pid(self) -> int:
        """Its process. Raises RuntimeError with the end of its log when it does not run."""
        pid = self.process.pid
        if pid is None:
            raise RuntimeError(f"the agent does not run; end of its log:\n{self.process.log_tail()}")
        return pid

    async def start(self) -> None:
        """Start it; return once its process exists."""
        self._port = None
        await anyio.to_thread.run_sync(self._start)

    def _start(self) -> None:
        self.process.log.unlink(missing_ok=True)
        self.process.start(self.settings)

    async def stop(self) -> None:
        """SIGTERM; raises RuntimeError unless it ends well."""
        code = await self.process.end(signal.SIGTERM, 10)
        if code != 0:
            raise RuntimeError(f"the agent ended with {code}; end of its log:\n{self.process.log_tail()}")

    async def kill(self) -> None:
        """SIGKILL, if it runs."""
        await self.process.end(signal.SIGKILL, 5)

    async def ready(self) -> None:
        """Wait until /readyz answers 200. Raises TimeoutError with what stood in the way."""
        seen = "nothing was answered"
        async with aiohttp.ClientSession() as client:
            with anyio.move_on_after(READY_SECONDS):
                while True:
                    if port := await self.http_port():
                        try:
                            async with client.get(f"http://127.0.0.1:{port}/readyz") as reply:
                                seen = await reply.text()
                                if reply.status == 200:
                                    return
                        except aiohttp.ClientError as error:
                            seen = str(error)
                    await anyio.sleep(0.002)
        raise TimeoutError(f"the agent is not ready after {READY_SECONDS:g} s: {seen}")

    async def http_port(self) -> int | None:
        """Its HTTP port, once the log has it."""
        if self._port is None:
            assert self.pid
            self._port = await anyio.to_thread.run_sync(self._logged_port)
        return self._port

    def _logged_port(self) -> int | None:
        for line in self.process.log.read_text().splitlines():
            try:
                event: Any = json.loads(line)
            except ValueError:
                continue
            if event.get("event") == "http_listening":
                return int(event["port"])
        return None

    async def scrape(self) -> str:
        """/metrics as text; empty while the agent is starting."""
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{await self.http_port()}/metrics") as reply,
        ):
            if reply.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return ""
            reply.raise_for_status()
            return await reply.text()

    def resident_mib(self) -> float:
        """Resident memory, by smaps_rollup."""
        return _kib(Path(f"/proc/{self.pid}/smaps_rollup"), "Rss") / 1024

    def peak_mib(self) -> float:
        """The most resident memory since the start."""
        return _kib(Path(f"/proc/{self.pid}/status"), "VmHWM") / 1024

    def cpu_seconds(self) -> float:
        """Processor time of all its threads, also of those that have ended, to the nanosecond.

        Linux makes the number of a process's clock of its PID (clock_getcpuclockid(3)).
        """
        return time.clock_gettime((~self.pid << 3) | 2)


def _kib(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {key}")
