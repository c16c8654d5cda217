"""The outside of an agent under test: its log lines, its HTTP pages, its metrics."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import anyio.to_thread

from tests.pace import scaled
from tests.scenarios.rig import Rig


async def logged(rig: Rig, event: str) -> list[Mapping[str, Any]]:
    """All log lines of one event."""

    def read() -> list[Mapping[str, Any]]:
        lines = rig.agent_log().read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in found if line.get("event") == event]

    return await anyio.to_thread.run_sync(read)


async def page(rig: Rig, path: str) -> tuple[int, str]:
    """One GET on the agent's HTTP port: status and text."""
    port = (await logged(rig, "http_listening"))[-1]["port"]

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=scaled(10)) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await anyio.to_thread.run_sync(ask)


async def metric(rig: Rig, pattern: str) -> float:
    """The sum of all samples whose name and labels match."""
    _, text = await page(rig, "/metrics")
    found = re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE)
    assert found, f"no sample {pattern}"
    return sum(float(each) for each in found)
