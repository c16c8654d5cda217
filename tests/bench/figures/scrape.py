"""Scrapes, as Prometheus waits for them."""

import time
from collections.abc import Mapping

import aiohttp

from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile

SCRAPES = 200
WARM_UP = 10
HEADERS = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}


@measurement(Figure("scrape_ms", "ms", 60, "one /metrics as OpenMetrics, gzipped; 99th percentile"))
async def scrape(conditions: Conditions) -> Mapping[str, Taken]:
    """Scrapes over one connection, one after the other."""
    values = []
    async with conditions.serving() as node, aiohttp.ClientSession(auto_decompress=False) as client:
        url = f"http://127.0.0.1:{await node.agent.http_port()}/metrics"
        for number in range(WARM_UP + SCRAPES):
            started = time.perf_counter()
            async with client.get(url, headers=HEADERS) as reply:
                body = await reply.read()
            if reply.status != 200 or not body:
                raise RuntimeError(f"/metrics answers {reply.status} with {len(body)} bytes")
            if number >= WARM_UP:
                values.append((time.perf_counter() - started) * 1000)
    return {"scrape_ms": Taken(percentile(values, 0.99), len(values))}
