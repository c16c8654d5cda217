"""A node in memory for the mode switcher: GPUs, holders, and resources that only write down what they did."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

import anyio

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.wire import ResourcePlugin
from agent.model.gpu import Driver, Gpu
from agent.model.holding import Holding, Record
from agent.model.modes import Assignment, Mode
from agent.model.node_inventory import Entry, everywhere
from agent.modes.desired import Desired
from agent.modes.planner import SwitchState
from agent.modes.resources import ResourceSet
from agent.modes.switcher import ModeSwitcher
from agent.modes.wing import Node as AgentNode
from agent.modes.wing import SetUpFailed, Wing


def gpu(index: int, product: str = "NVIDIA H200", mig: bool = False) -> Gpu:
    """A GPU with its index in its UUID."""
    return Gpu(f"GPU-{index:08x}", index, index, f"0000:{index:02x}:00.0", product, 143771 << 20, (9, 0), mig)


def snapshot_of(*gpus: Gpu) -> Snapshot:
    """An inventory of healthy GPUs."""
    states = tuple(GpuState(each) for each in gpus)
    driver = Driver("580.95.05", "13.580.95.05", (13, 0))
    return Snapshot(1, driver, None, states, by_uuid={state.uuid: state for state in states})


class Kubelet:
    """Stands for PodResources: who holds what."""

    def __init__(self) -> None:
        self.cell: Cell[Record | None] = Cell(Record((), ()))
        self.problem: str | None = None
        self.reads = 0
        self.parents: dict[str, str] = {}  # instance -> its GPU

    async def refresh(self) -> Record | None:
        self.reads += 1
        await anyio.lowlevel.checkpoint()
        return self.cell.value

    def hold(self, pod: str, resource: str, *ids: str) -> None:
        """A pod's only container gets device IDs."""
        known = self.cell.value or Record((), ())
        holding = Holding("default", pod, "main", resource, ids)
        self.cell.publish(Record((*known.holdings, holding), known.containers, parents=self.parents))

    def end(self, pod: str) -> None:
        """A pod is gone."""
        known = self.cell.value or Record((), ())
        left = tuple(each for each in known.holdings if each.pod != pod)
        self.cell.publish(Record(left, known.containers, parents=self.parents))


@dataclass
class Lists(ResourceSet):
    """Stands for the resources: keeps each assignment that the lists were brought up to."""

    assignment: Cell[Assignment]
    enabled: list[Mode] = field(default_factory=list)
    history: list[Assignment] = field(default_factory=list)
    granted: set[str] = field(default_factory=set)
    deliveries: int = 0

    def enable(self, mode: Mode) -> None:
        if mode not in self.enabled:
            self.enabled.append(mode)

    def look(self) -> None:
        pass

    def refresh(self) -> None:
        self.history.append(self.assignment.value)

    async def delivered(self) -> None:
        self.deliveries += 1
        await anyio.lowlevel.checkpoint()

    def granted_lately(self) -> frozenset[str]:
        return frozenset(self.granted)


class Daemon(Wing):
    """A mode that prepares GPUs: counts, and fails or waits as the test sets it to."""

    mode: ClassVar[Mode] = Mode.MPS
    prepares: ClassVar[bool] = True

    def __init__(self) -> None:
        self.up: set[str] = set()
        self.log: list[str] = []
        self.fail: str | None = None
        self.gate: anyio.Event | None = None
        self.version = 1  # of the program
        self.problem = ""  # why no GPU can be offered in it
        self.used: set[str] = set()  # GPUs with somebody at work
        self.sees = True  # whether there is
        self.asked: Callable[[], None] = lambda: None  # called when it is asked about that

    @classmethod
    async def build(cls, node: AgentNode) -> Self:  # noqa: ARG003
        return cls()

    def plugins(self) -> Sequence[ResourcePlugin]:
        return ()

    def obstacle(self, state: GpuState) -> str:
        return self.problem

    async def prepare(self, gpu: Gpu) -> None:
        self.log.append(f"up {gpu.index}")
        if self.gate:
            await self.gate.wait()
        if self.fail:
            raise SetUpFailed(self.fail)
        self.up.add(gpu.uuid)

    async def give_back(self, gpu: Gpu) -> None:
        self.log.append(f"down {gpu.index}")
        self.up.discard(gpu.uuid)

    async def at_work(self, gpu: Gpu, *, surely: bool) -> bool | None:
        del surely
        self.asked()
        await anyio.lowlevel.checkpoint()
        return gpu.uuid in self.used if self.sees else None

    def depends_on(self) -> object:
        return self.version


class Announcements:
    """Stands for node.status: keeps what was announced ahead of the lists."""

    def __init__(self, lists: Lists) -> None:
        self._lists = lists
        self.log: list[str] = []
        self.served = anyio.Event()  # bound pods have their devices
        self.served.set()

    async def withdraw(self, ahead: Assignment, publish: Callable[[], Awaitable[None]]) -> None:
        self.log.append(f"shrink after {len(self._lists.history)} lists")
        await anyio.lowlevel.checkpoint()
        await self.served.wait()
        await publish()
        self.log.append(f"settled after {len(self._lists.history)} lists")


@dataclass
class Node:
    """A switcher on a node in memory."""

    inventory: Cell[Snapshot]
    desired: Cell[Desired]
    assignment: Cell[Assignment]
    kubelet: Kubelet
    lists: Lists
    switcher: ModeSwitcher

    def want(self, mode: Mode | tuple[Entry, ...], name: str = "") -> None:
        """Ask for a mode everywhere, or for a layout."""
        if isinstance(mode, Mode):
            self.desired.publish(Desired(mode.value, everywhere(mode)))
        else:
            self.desired.publish(Desired(name or "layout", mode))

    def modes(self) -> list[str]:
        """The mode in force of each GPU by index; `-` behind it while nothing is offered."""
        return [
            f"{found.mode.value}{'' if found.offered else '-'}"
            for state in self.inventory.value.gpus
            for found in [self.assignment.value.of(state.uuid)]
        ]

    async def reach(self, *modes: str) -> None:
        """Wait until the GPUs are in these modes."""
        with anyio.fail_after(10):
            while self.modes() != list(modes):
                await anyio.sleep(0.005)


@asynccontextmanager
async def switching(
    *gpus: Gpu,
    wings: Mapping[Mode, Wing] | None = None,
    kubelet: Kubelet | None = None,
    announce: bool = False,
    first: Mode = Mode.OFF,
    when_busy: str = "drain",
    desired: Desired | None = None,
    standing: Desired | None = None,
    draining: Collection[Mode] = (),
    cordons: Any = None,
    lingering: Any = None,
    unexplained: Any = None,
    state: Cell[SwitchState] | None = None,
    lacks: Cell[str] | None = None,
    run: bool = True,
) -> AsyncIterator[Node]:
    """Run a switcher over `gpus`; the first request is `desired`, or mode `first` everywhere.

    Without `run` its test runs it.
    """
    inventory = Cell(snapshot_of(*gpus))
    requests = Cell(desired or Desired(first.value, everywhere(first)))
    assignment = Cell(Assignment())
    kubelet, lists = kubelet or Kubelet(), Lists(assignment)
    switcher = ModeSwitcher(
        inventory,
        requests,
        assignment,
        cast("Any", kubelet),
        lists,
        announcer=Announcements(lists) if announce else None,
        wings=wings or {},
        when_busy="refuse" if when_busy == "refuse" else "drain",
        standing=standing,
        draining=draining,
        cordons=cordons,
        lingering=lingering,
        unexplained=unexplained,
        state=state,
        lacks=lacks,
    )
    async with anyio.create_task_group() as group:
        if run:
            group.start_soon(switcher.run)
        yield Node(inventory, requests, assignment, kubelet, lists, switcher)
        group.cancel_scope.cancel()
