"""A real Prometheus beside the agent, on loopback, with the chart's rules at a test's pace."""

import contextlib
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import anyio.to_thread
import yaml

from tests.cluster.rig import free_ports
from tests.pace import scaled
from tests.prometheus_binaries import programs

START_SECONDS = 20.0
PACE = "500ms"
NO_OTHERS: Mapping[str, int] = MappingProxyType({})


@dataclass
class Prometheus:
    """One server; everything it knows goes with its folder."""

    url: str
    process: subprocess.Popen[bytes]

    async def query(self, expression: str) -> list[Mapping[str, Any]]:
        """The vector of an instant query. AssertionError with Prometheus' words for a bad one."""
        parameters = urllib.parse.urlencode({"query": expression})
        answer = await self._get(f"/api/v1/query?{parameters}")
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        found: list[Mapping[str, Any]] = answer["data"]["result"]
        return found

    async def range(self, expression: str, seconds: int, step: int) -> list[Mapping[str, Any]]:
        """The matrix of a range query over the last `seconds`. AssertionError as `query`."""
        end = int(time.time())
        asked = {"query": expression, "start": end - seconds, "end": end, "step": step}
        answer = await self._get(f"/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        found: list[Mapping[str, Any]] = answer["data"]["result"]
        return found

    async def asked(self, path: str, **parameters: object) -> Any:
        """The data of an answer, with statistics of the query."""
        answer = await self._get(f"/api/v1/{path}?{urllib.parse.urlencode({**parameters, 'stats': 'all'})}")
        assert answer["status"] == "success", f"{parameters}: {answer['error']}"
        return answer["data"]

    async def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = (await self._get("/api/v1/alerts"))["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    async def failed_rules(self) -> list[str]:
        """Rules that could not be evaluated, with the reason."""
        groups = (await self._get("/api/v1/rules"))["data"]["groups"]
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] == "err"
        ]

    async def wait(
        self, wanted: Sequence[str], look: Callable[[str], Any], seconds: float, what: str
    ) -> float:
        """Wait until `look` finds something for each of `wanted`; the seconds it took."""
        missing, began = list(wanted), anyio.current_time()
        with anyio.move_on_after(scaled(seconds)):
            while True:
                missing = [each for each in missing if not await look(each)]
                if not missing:
                    return anyio.current_time() - began
                await anyio.sleep(0.3)
        raise AssertionError(f"{what} after {seconds:g} s:\n" + "\n".join(missing))

    async def _get(self, path: str) -> Any:
        def ask() -> Any:
            try:
                with urllib.request.urlopen(self.url + path, timeout=scaled(10)) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                with error:
                    return json.load(error)

        return await anyio.to_thread.run_sync(ask)


@contextlib.asynccontextmanager
async def prometheus(
    folder: Path, agent_port: int, rules: Mapping[str, str], others: Mapping[str, int] = NO_OTHERS
) -> AsyncIterator[Prometheus]:
    """Prometheus that scrapes the agent as node `n1`, twice a second; `rules` are files by name.

    `others`: further ports on loopback to scrape, by job.
    """
    for name, text in rules.items():
        await anyio.to_thread.run_sync((folder / name).write_text, text)
    ports = {"gpu-node-agent": agent_port, **others}
    labels = {"gpu-node-agent": {"node": "n1", "cluster": "c1"}}
    configuration = {
        "global": {"scrape_interval": PACE, "scrape_timeout": PACE, "evaluation_interval": PACE},
        "rule_files": [str(folder / name) for name in rules],
        "scrape_configs": [
            {
                "job_name": job,
                "honor_labels": True,
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}"], "labels": labels.get(job, {"cluster": "c1"})}
                ],
            }
            for job, port in ports.items()
        ],
    }
    async with served(folder, configuration, "--query.lookback-delta=5s") as server:
        yield server


@contextlib.asynccontextmanager
async def served(folder: Path, configuration: Mapping[str, Any], *flags: str) -> AsyncIterator[Prometheus]:
    """Prometheus over the blocks in `data` of the folder, if there are any."""
    program = (await anyio.to_thread.run_sync(programs)) / "prometheus"
    (port,) = free_ports(1)
    process = await anyio.to_thread.run_sync(_start, program, folder, port, configuration, flags)
    server = Prometheus(f"http://127.0.0.1:{port}", process)
    try:
        with anyio.fail_after(START_SECONDS):
            while True:
                assert process.poll() is None, f"prometheus ended:\n{(folder / 'prometheus.log').read_text()}"
                # It answers plain text while it loads.
                with contextlib.suppress(OSError, ValueError):
                    await server.query("vector(1)")
                    break
                await anyio.sleep(0.1)
        yield server
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process.wait)


def _start(
    program: Path, folder: Path, port: int, configuration: Mapping[str, Any], flags: Sequence[str]
) -> subprocess.Popen[bytes]:
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with (folder / "prometheus.log").open("wb") as log:
        return subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *flags,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
