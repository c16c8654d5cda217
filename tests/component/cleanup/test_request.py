"""A clean-up that an annotation asks for: the real agent leaves service, cleans its node, and comes back."""

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from agent.cleanup.request import NOTHING, REPORT, REQUEST, CleanupReport, CleanupState, asking, taking_back
from agent.cluster.api import KubeApi
from tests.component.cluster.server import client
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.rig import GPU

WITHIN = 30.0


class Asked:
    """The agent of an embedded node, and the hook that asks it to clean up."""

    def __init__(self, rig: EmbeddedRig, api: KubeApi) -> None:
        self.rig = rig
        self._api = api
        self._path = f"/api/v1/nodes/{rig.kubelet.api.node_name}"

    async def annotate(self, annotations: Mapping[str, str | None]) -> None:
        await self._api.merge_patch(self._path, {"metadata": {"annotations": dict(annotations)}})

    async def ask(self, seconds: float, name: str = "first") -> None:
        await self.annotate(asking(name, datetime.now(UTC), seconds))

    async def report(self, name: str = "first") -> CleanupReport:
        """The answer to that request, once it is there."""
        with anyio.fail_after(WITHIN):
            while True:
                text = self.rig.http.annotations.get(REPORT)
                found = msgspec.json.decode(text, type=CleanupReport) if text else None
                if found and found.id == name:
                    return found
                await anyio.sleep(0.02)

    async def serves(self) -> None:
        """Wait until all GPUs are offered and the node object says so."""
        await self.rig.wait_allocatable(8, deadline=WITHIN)
        with anyio.fail_after(WITHIN):
            while "gpu-node-agent.io/mode" not in self.rig.http.labels or not self.rig.http.conditions:
                await anyio.sleep(0.02)

    def port(self) -> int:
        lines = [json.loads(line) for line in self.rig.agent.log.read_text().splitlines() if line[:1] == "{"]
        found: int = [line["port"] for line in lines if line["event"] == "http_listening"][-1]
        return found

    async def probe(self, path: str) -> tuple[int, str]:
        def get() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port()}{path}", timeout=scaled(5)
                ) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        return await anyio.to_thread.run_sync(get)

    def traces(self) -> dict[str, Any]:
        """Traces of the agent on the node and its object, but for both annotations."""
        rig, http = self.rig, self.rig.http
        folders = (rig.kubelet.root / "plugins_registry", rig._folder / "state", rig._folder / "run")
        return {
            "labels": [
                key for key in http.labels if key.startswith(("gpu-node-agent.io/", "cuda-", "nvidia"))
            ],
            "annotations": [key for key in http.annotations if key not in NOTHING],
            "conditions": list(http.conditions),
            "taints": list(rig.kubelet.api.taints),
            "files": [
                path.name
                for folder in folders
                for path in (folder.iterdir() if folder.is_dir() else ())
                if path.name != "agent.lock"
            ],
        }


CLEAN: dict[str, Any] = {"labels": [], "annotations": [], "conditions": [], "taints": [], "files": []}


@asynccontextmanager
async def asked() -> AsyncIterator[Asked]:
    """An agent that serves."""
    async with embedded_rig(status_tick=0.1) as rig:
        await rig.start_agent({**await rig.api_access(), "health.kernelLog": None})
        async with client(f"http://127.0.0.1:{rig.http.port}") as api:
            made = Asked(rig, api)
            await made.serves()
            yield made


async def test_cleans_its_node_and_serves_again_when_that_is_called_off() -> None:
    async with asked() as one:
        process = one.rig.agent.pid
        await one.ask(60)
        assert (await one.report()).state is CleanupState.CLEAN
        assert one.traces() == CLEAN
        assert one.rig.kubelet.allocatable[GPU] == 0
        assert await one.probe("/healthz") == (200, "ok\n"), "the kubelet must not restart it meanwhile"
        status, why = await one.probe("/readyz")
        assert status == 503
        assert "cleaned up for an uninstall" in why
        await one.annotate(taking_back("first"))
        await one.serves()
        assert one.rig.agent.pid == process
        with anyio.fail_after(WITHIN):
            while NOTHING.keys() & one.rig.http.annotations.keys():
                await anyio.sleep(0.02)


async def test_a_request_that_nobody_ends_ends_by_itself() -> None:
    """The hook was killed."""
    async with asked() as one:
        await one.ask(scaled(4))
        assert (await one.report()).state is CleanupState.CLEAN
        await one.serves()
        with anyio.fail_after(WITHIN):
            while NOTHING.keys() & one.rig.http.annotations.keys():
                await anyio.sleep(0.02)


async def test_stays_clean_until_it_is_deleted() -> None:
    """The hook has taken its annotations away, and helm deletes the agent a moment later."""
    async with asked() as one:
        await one.ask(60)
        await one.report()
        await one.annotate(NOTHING)
        await anyio.sleep(1)
        assert one.traces() == CLEAN
        assert await one.rig.stop_agent(5) == 0
        assert one.traces() == CLEAN
        assert one.rig.http.annotations == {}


async def test_a_second_uninstall_is_answered_out_of_service() -> None:
    async with asked() as one:
        await one.ask(60)
        await one.report()
        await one.ask(60, "second")
        assert (await one.report("second")).state is CleanupState.CLEAN
        assert one.rig.kubelet.allocatable[GPU] == 0
        assert one.traces() == CLEAN


async def test_annotations_that_say_nothing_are_put_away() -> None:
    async with asked() as one:
        for text in ("", "yes", '{"id": 1}', '{"id": "x", "until": "2026-11-22T08:00:00"}', "[" * 5000):
            await one.annotate({REQUEST: text, REPORT: "?"})
            with anyio.fail_after(WITHIN):
                while NOTHING.keys() & one.rig.http.annotations.keys():
                    await anyio.sleep(0.02)
        assert one.rig.kubelet.allocatable[GPU] == 8
