"""Everything a scrape shows, read on the event loop at one moment and frozen.

The rendering happens in a thread. Were it to read the live objects there, a dictionary that the loop
changes meanwhile would fail the scrape, and a scrape would show halves of two states.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.inventory.actor import Inventory
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.supervise import Supervisor, TaskState
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.service import ServiceStats
from agent.nvml.worker_thread import WorkerThread
from agent.telemetry.container_use import Uses
from agent.telemetry.definitions import Definition
from agent.telemetry.sampler import Sampler, TakenSample

Series = tuple[Definition, float, tuple[str, ...]]  # a metric, its value, its labels as in the definition
Collector = Callable[[], Iterable[Series]]  # reads the series of another room, on the event loop


@dataclass(frozen=True, slots=True)
class ResourceReading:
    """One resource: whether the kubelet listens, and the counts of its socket."""

    resource: str
    registered: bool
    stats: ServiceStats


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment of the agent; nothing in it changes any more."""

    snapshot: Snapshot
    samples: Mapping[str, TakenSample]
    sample_failures: Mapping[str, int]
    stuck_calls: int
    resources: tuple[ResourceReading, ...]
    tasks: tuple[TaskState, ...]
    mailbox_depth: int
    mailbox_dropped: int
    ready: bool
    collected: tuple[Series, ...] = ()
    uses: Uses = field(default_factory=Uses)


@dataclass(frozen=True, slots=True)
class Sources:
    """The rooms that a reading is taken from; `endpoints` and `parts` may still grow."""

    inventory: Inventory
    sampler: Sampler
    threads: Sequence[WorkerThread]
    endpoints: Sequence[Endpoint]
    supervisor: Supervisor
    blockers: Callable[[], Sequence[str]]
    collectors: list[Collector] = field(default_factory=list)
    uses: Cell[Uses] | None = None

    def read(self) -> Reading:
        """The present moment; call it on the event loop."""
        return Reading(
            snapshot=self.inventory.snapshot.value,
            samples=self.sampler.fresh(),
            sample_failures=self.sampler.samples.value.failures,
            stuck_calls=sum(thread.stuck for thread in self.threads),
            resources=tuple(
                ResourceReading(endpoint.plugin.resource, endpoint.registered, frozen(endpoint.service.stats))
                for endpoint in self.endpoints
            ),
            tasks=tuple(replace(state) for state in self.supervisor.states.values()),
            mailbox_depth=self.inventory.mailbox.depth,
            mailbox_dropped=self.inventory.mailbox.dropped,
            ready=not self.blockers(),
            collected=tuple(series for collect in self.collectors for series in collect()),
            uses=self.uses.value if self.uses else Uses(),
        )


def frozen(stats: ServiceStats) -> ServiceStats:
    """A copy that later calls do not change."""
    return replace(stats, calls=dict(stats.calls), seconds=dict(stats.seconds))
