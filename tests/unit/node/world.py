"""One agent's node room over an API server in memory, with lists that a kubelet reads."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from agent.cluster.node import Amounts, OwnNode
from agent.kit.tasks import Cell
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.modes import Assignment, GpuMode, Mode
from agent.node.capacity import Capacity, Offer, SchedulingTaint
from agent.node.driver_upgrade import Inherited
from agent.node.withdrawal import Withdrawals
from tests.unit.node.memory_api import MemoryApi

GPU, CORE = "nvidia.com/gpu", "tencent.com/vcuda-core"
READ_SECONDS = 0.01  # until the kubelet has read a list


def all_in(mode: Mode) -> Assignment:
    """Eight GPUs, all of them in one mode."""
    return Assignment({f"GPU-{index}": GpuMode(mode) for index in range(8)})


PGPU, VGPU, NOTHING = all_in(Mode.PGPU), all_in(Mode.VGPU), Assignment()


def lists(assignment: Assignment) -> Amounts:
    """Both resources stay registered for life."""
    modes = [mode.mode for mode in assignment.gpus.values()]
    gpus, cores = modes.count(Mode.PGPU), 100 * modes.count(Mode.VGPU)
    return {GPU: (8, gpus), CORE: (800, cores)}


@dataclass
class Kubelet:
    """The pods that it knows, and the bound pods that it has not served yet."""

    known: dict[str, int] = field(default_factory=dict)
    unserved: set[str] = field(default_factory=set)
    mute: bool = False  # does not say what it knows
    reads: bool = True  # takes in the lists that it gets
    asked: int = 0
    registered_again: list[float] = field(default_factory=list)  # when

    def register_again(self, names: frozenset[str]) -> None:
        """It reads the list of a resource that it did not listen to."""
        assert names <= {GPU, CORE}
        self.registered_again.append(anyio.current_time())

    async def taken_in(self) -> Mapping[str, int]:
        """GetAllocatableResources."""
        self.asked += 1
        await anyio.sleep(0.001)
        if self.mute:
            raise PodResourcesUnavailable("it does not answer")
        return dict(self.known)

    async def waiting(self) -> frozenset[str]:
        """Pods without their devices."""
        await anyio.sleep(0.001)
        return frozenset(self.unserved)


class World:
    """The node room of one agent's life; several may follow each other over one API server and kubelet."""

    def __init__(
        self,
        api: MemoryApi,
        kubelet: Kubelet,
        assignment: Assignment = PGPU,
        offered: Callable[[Assignment], Amounts] = lists,
    ) -> None:
        self.api, self.kubelet = api, kubelet
        self.assignment = Cell(assignment)
        self.node = own = OwnNode(api, "n")
        offer = Offer(self.assignment, offered, self._delivered, kubelet.taken_in, kubelet.register_again)
        self.taint = SchedulingTaint(own)
        self.capacity = Capacity(own, offer, self.taint)
        self.withdrawals = Withdrawals(own, offer, self.capacity, self.taint, kubelet.waiting)
        self.inherited = Inherited(own, offer, self.capacity, self.taint, frozenset({GPU, CORE}))
        self.published: list[float] = []  # when smaller lists went out

    async def _delivered(self) -> None:
        await anyio.sleep(READ_SECONDS)
        if self.kubelet.reads:
            self.kubelet.known = {name: left for name, (_, left) in lists(self.assignment.value).items()}

    async def switch(self, to: Assignment) -> None:
        """As the switcher does: withdraw what is offered, then offer something else."""
        await self.withdrawals.withdraw(NOTHING, lambda: self.publish(NOTHING))
        await self.publish(to)
        self.capacity.wake()

    async def stop(self) -> None:
        """As an agent does at SIGTERM."""
        await self.withdrawals.stop(lambda: self.publish(NOTHING))

    async def publish(self, assignment: Assignment) -> None:
        """Put an assignment in force."""
        if assignment is NOTHING and self.assignment.value is not NOTHING:
            self.published.append(anyio.current_time())
        self.assignment.publish(assignment)
        await self._delivered()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """Its tasks run."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.node.reflector.run)
            group.start_soon(self.inherited.run)
            group.start_soon(self.taint.run)
            group.start_soon(self.capacity.run)
            yield self
            group.cancel_scope.cancel()

    async def settled(self, seconds: float = 60.0) -> None:
        """Wait until no taint stands and the status says what the lists say."""
        wanted = {name: left for name, (_, left) in lists(self.assignment.value).items() if left}
        with anyio.move_on_after(seconds):
            while self.api.tainted or self.api.allocatable != wanted:
                await anyio.sleep(0.05)
            return
        raise AssertionError(f"tainted {self.api.tainted}, {self.api.allocatable} is not {wanted}")


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """An agent that has offered eight whole GPUs for a while."""
    api, kubelet = MemoryApi(), Kubelet()
    api.node["status"] = {"capacity": {GPU: "8", CORE: "800"}, "allocatable": {GPU: "8", CORE: "0"}}
    made = World(api, kubelet)
    await made._delivered()
    async with made.running():
        await made.settled()
        await anyio.sleep(11)
        api.writes.clear()
        yield made
