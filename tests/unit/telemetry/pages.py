"""A page of metrics, rendered and read back."""

import anyio
import anyio.to_thread
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.telemetry.rendering import render
from agent.telemetry.series import Reading, Sources
from agent.web.server import Reply

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def values(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every series of a page in the text format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(page)
        for sample in family.samples
    }


def value(page: str, name: str, **labels: str) -> float | None:
    return values(page).get((name, tuple(sorted(labels.items()))))


async def rendered(reading: Reading, accept: str = "") -> Reply:
    return await anyio.to_thread.run_sync(render, reading, accept)


async def page(sources: Sources, accept: str = "") -> str:
    return (await rendered(sources.read(), accept)).body.decode()
