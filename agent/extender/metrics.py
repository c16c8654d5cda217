"""The extender's metrics. It shares no metric with the node agent.

Figures of the ledger are there only while this replica leads: a former leader's last ones would be summed up
with those of its successor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import anyio.to_thread
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from agent.web.server import Reply

PREFIX = "gpu_agent_extender_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class LedgerFigures:
    """The ledger of a leader, as one scrape shows it; each field is a gauge of its name."""

    nodes: int
    nodes_without_inventory: int
    nodes_bad_inventory: int
    pods: int
    assumed_pods: int
    sold_ratio: float | None  # None: no node has an inventory
    watch_age_seconds: Mapping[str, float]  # by resource


class ExtenderMetrics:
    """Counters that the verbs raise, and gauges that are set at each scrape."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            PREFIX + "requests", "Calls of kube-scheduler by verb and result.", ["verb", "result"],
            registry=registry,
        )  # fmt: skip
        self.responses = Counter(
            PREFIX + "responses", "Answers to kube-scheduler by verb and HTTP status.", ["verb", "code"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            PREFIX + "request_seconds", "Time to answer, by verb.", ["verb"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.expired = Counter(
            PREFIX + "expired_choices", "Choices dropped, neither confirmed nor shown as bound in time.",
            registry=registry,
        )  # fmt: skip
        self.leader = Gauge(PREFIX + "leader", "1 if this replica leads.", registry=registry)
        self.ready = Gauge(
            PREFIX + "ready",
            "1 if it leads, its ledger is complete and the Service finds it.",
            registry=registry,
        )
        self.ledger = LedgerCollector()
        registry.register(self.ledger)

    async def reply(self, ledger: LedgerFigures | None) -> Reply:
        """The page; `ledger`: None while this replica does not lead."""
        self.ledger.figures = ledger
        text = await anyio.to_thread.run_sync(generate_latest, self.registry)
        return Reply(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


class LedgerCollector(Collector):
    """Gauges of the ledger that is there now."""

    def __init__(self) -> None:
        self.figures: LedgerFigures | None = None

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(PREFIX + name, text) for name, text in _GAUGES.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Families with samples; none while there is no ledger."""
        if self.figures is None:
            return
        for name, value in asdict(self.figures).items():
            family = PREFIX + name, _GAUGES[name]
            if isinstance(value, Mapping):
                by_resource = GaugeMetricFamily(*family, labels=["resource"])
                for resource, each in value.items():
                    by_resource.add_metric([resource], each)
                yield by_resource
            elif value is not None:
                yield GaugeMetricFamily(*family, value)


# By the field of LedgerFigures that has the value.
_GAUGES = {
    "nodes": "Nodes of the cluster.",
    "nodes_without_inventory": (
        "Nodes that offer GPU resources and have no usable inventory: judged by totals alone."
    ),
    "nodes_bad_inventory": "Nodes whose inventory cannot be understood.",
    "pods": "Bound pods with GPUs, those about to be bound included.",
    "assumed_pods": "Choices that the watch has not shown yet.",
    "sold_ratio": "Share of all GPUs that is held, on nodes with an inventory.",
    "watch_age_seconds": (
        "Seconds since the API server last showed that the watch lives; about 60 on a quiet cluster."
    ),
}
