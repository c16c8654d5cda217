"""What the extender tells Prometheus. It shares no metric with the node agent."""

import anyio.to_thread
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agent.web.server import Reply, Request

PREFIX = "gpu_agent_extender_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Counters that verbs raise, and gauges that are set when somebody looks."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            PREFIX + "requests", "Calls of kube-scheduler by verb and result.", ["verb", "result"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            PREFIX + "request_seconds", "Time to answer, by verb.", ["verb"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry)

        self.leader = gauge("leader", "1 if this replica serves.")
        self.ready = gauge("ready", "1 if it leads and its ledger is complete.")
        self.nodes = gauge("nodes", "Nodes that there are.")
        self.without_inventory = gauge("nodes_without_inventory", "Of those, judged by totals alone.")
        self.bad_inventories = gauge("nodes_bad_inventory", "Nodes whose inventory cannot be understood.")
        self.pods = gauge("pods", "Bound pods with GPUs, those about to be bound included.")
        self.assumed = gauge("assumed_pods", "Choices that the watch has not shown yet.")
        self.expired = gauge("expired_choices", "Choices dropped since the start: never shown as bound.")
        self.sold = gauge("sold_ratio", "Share of all GPUs that is held, on nodes with an inventory.")

    async def reply(self, _: Request) -> Reply:
        """The page."""
        text = await anyio.to_thread.run_sync(generate_latest, self.registry)
        return Reply(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
