"""The metrics' pages: formats, compression, many scrapes at a time, the names of the former product."""

import gzip
from dataclasses import replace

import aiohttp
import anyio
import anyio.to_thread
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from agent.kit.tasks import Cell
from agent.telemetry.rendering import MetricsPage
from agent.telemetry.series import COMPATIBLE
from agent.web.server import HttpServer
from tests.unit.telemetry.agents import Parts
from tests.unit.telemetry.pages import OPENMETRICS, rendered, value
from tests.unit.telemetry.uses import many_uses


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0"),
        ("text/plain;version=nonsense", "text/plain; version=0.0.4"),
    ],
)
async def test_the_format_follows_accept(accept: str, expected: str) -> None:
    reply = await rendered(Parts().sources.read(), accept)
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith(expected)


async def test_a_scrape_over_http_compressed_and_plain_with_nvml_untouched() -> None:
    parts = Parts()
    uuids = parts.scan()
    parts.machine.hang(None)  # whatever asked NVML now would not return
    server = HttpServer("127.0.0.1", 0)
    MetricsPage(parts.sources).add_to(server)
    async with anyio.create_task_group() as group:
        port = await group.start(server.serve)
        url = f"http://127.0.0.1:{port}/metrics"
        async with aiohttp.ClientSession(auto_decompress=False) as client:
            async with client.get(url, headers={"Accept-Encoding": "gzip"}) as reply:
                assert reply.headers["Content-Encoding"] == "gzip"
                text = gzip.decompress(await reply.read()).decode()
            async with client.get(url, headers={"Accept-Encoding": "identity"}) as reply:
                assert "Content-Encoding" not in reply.headers
                assert "gpu_agent_ready" in await reply.text()
        group.cancel_scope.cancel()
    parts.machine.clear_faults()
    assert value(text, "gpu_agent_gpu_healthy", gpu=uuids[0], index="0") == 1


async def test_gpu_managers_metrics_are_an_option_with_a_path_of_its_own() -> None:
    parts = Parts("dgx-h200")
    uses = many_uses(parts.scan(), 1)
    sources = replace(parts.sources, uses=Cell(uses))
    for node in (None, "n1"):
        server = HttpServer("127.0.0.1", 0)
        MetricsPage(sources, node).add_to(server)
        async with anyio.create_task_group() as group:
            port = await group.start(server.serve)
            async with aiohttp.ClientSession() as client:
                async with client.get(
                    f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPENMETRICS}
                ) as reply:
                    text = await reply.text()
                async with client.get(f"http://127.0.0.1:{port}/metric") as reply:
                    assert reply.status == (404 if node is None else 200)
            group.cancel_scope.cancel()
        families = {family.name: family for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
        named = {family for family in families if family.startswith("container_")}
        assert named == ({each.name for each in COMPATIBLE} if node else set())
        for family in named:
            assert {sample.labels["node"] for sample in families[family].samples} == {"n1"}


async def test_many_scrapes_at_a_time_are_all_answered() -> None:
    parts = Parts("dgx-h200")
    parts.scan()
    server = HttpServer("127.0.0.1", 0)
    MetricsPage(parts.sources).add_to(server)
    answered = 0

    async def scrape(client: aiohttp.ClientSession, port: int) -> None:
        nonlocal answered
        async with client.get(f"http://127.0.0.1:{port}/metrics") as reply:
            assert "gpu_agent_ready" in await reply.text()
            answered += 1

    async with anyio.create_task_group() as group:
        port = await group.start(server.serve)
        async with aiohttp.ClientSession() as client, anyio.create_task_group() as scrapes:
            for _ in range(20):
                scrapes.start_soon(scrape, client, port)
        group.cancel_scope.cancel()
    assert answered == 20
