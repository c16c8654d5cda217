"""/metrics: in Prometheus' text format or OpenMetrics as asked, rendered and compressed off the loop."""

import gzip

import anyio
import anyio.to_thread
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import CollectorRegistry

from agent.telemetry.metrics import AgentCollector
from agent.telemetry.process import read_process_use
from agent.telemetry.reading import Reading, Sources
from agent.web.server import HttpServer, Reply, Request

# A page of 3,200 series shrinks to a twentieth at any level; higher ones only cost time.
GZIP_LEVEL = 3


class MetricsPage:
    """Answers scrapes. No NVML call is made for one: it shows what the sampler read."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        # One rendering at a time: many scrapers must not take the worker threads or the processor away.
        self._turn = anyio.CapacityLimiter(1)

    def add_to(self, server: HttpServer) -> None:
        """Take the route."""
        server.add_route("/metrics", self.reply)

    async def reply(self, request: Request) -> Reply:
        """The page of this moment."""
        reading = self._sources.read()
        accept, encodings = request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", "")
        return await anyio.to_thread.run_sync(render, reading, accept, encodings, limiter=self._turn)


def render(reading: Reading, accept: str = "", encodings: str = "") -> Reply:
    """The page for a reading, in the format that `accept` prefers, compressed if `encodings` allows."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(reading, read_process_use()))
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number: the plain format is understood by all
        encode, content_type = choose_encoder("")
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    body = encode(registry)
    if gzip_accepted(encodings):
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
    return Reply(body, 200, headers)
