"""/metrics: in Prometheus' text format or OpenMetrics as asked, rendered and compressed off the loop."""

from collections.abc import Callable

import anyio
import anyio.to_thread

from agent.telemetry.reading import Sources
from agent.telemetry.rendering import render
from agent.web.server import Handler, HttpRequest, HttpServer, Reply

METRICS_PATH = "/metrics"


class MetricsPage:
    """Answers scrapes. No NVML call is made for one: it shows the sampler's last round."""

    def __init__(
        self, sources: Sources, compatible_node: str | None = None, *, simulated: bool = False
    ) -> None:
        """`compatible_node`: the node's name, for gpu-manager's metrics beside the agent's; None: without.

        `simulated`: the GPUs are, and every series says so.
        """
        self._simulated = simulated
        self._sources = sources
        self._compatible_node = compatible_node
        # One rendering at a time: many scrapers must not take the worker threads or the processor away.
        self._turn = anyio.CapacityLimiter(1)

    def add_to(self, server: HttpServer, guarded: Callable[[Handler], Handler] = lambda page: page) -> None:
        """`guarded`: who may have it."""
        for path in self._paths:
            server.add_route(path, guarded(self.reply))

    def refer(self, server: HttpServer, port: int) -> None:
        """Say on another server where the page is."""

        async def elsewhere(_: HttpRequest) -> Reply:
            served = f"metrics are served over HTTPS on port {port}, to accounts that may get them"
            return Reply.text(served, 403)

        for path in self._paths:
            server.add_route(path, elsewhere)

    @property
    def _paths(self) -> tuple[str, ...]:
        # gpu-manager serves them at the second.
        return (METRICS_PATH,) if self._compatible_node is None else (METRICS_PATH, "/metric")

    async def reply(self, request: HttpRequest) -> Reply:
        reading = self._sources.read()
        accept, encodings = request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", "")
        node = self._compatible_node
        arguments = (reading, accept, encodings, node, self._simulated)
        return await anyio.to_thread.run_sync(render, *arguments, limiter=self._turn)
