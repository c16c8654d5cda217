"""The wing of vGPU: fractions of a GPU, with limits where they are enforced."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import anyio
import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kubelet.wire import Allocation, Reason, Refused, ResourcePlugin
from agent.lists.shared_pair import SharedPair, SharedPairPlugin, Sharing, pairing_of, pairs_collector
from agent.model.cuda import hooked, vgpu_warning
from agent.model.demand import VGPU
from agent.model.gpu import Driver, Gpu
from agent.model.holding import Growth, Holding, PairMember, by_gpu
from agent.model.holding import Place as PlaceOfContainer
from agent.model.look import Look
from agent.model.modes import Mode
from agent.modes.wing import Document, Machine, Node, Task, Wing
from agent.nvml.port import NvmlPort
from agent.pairing.pair_rules import Grant
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.series import Series
from agent.vgpu import library, memory_limits
from agent.vgpu.folders import FOLDER, Place, roots
from agent.vgpu.limits import Enforcement
from agent.vgpu.node_limits import NodeLimits

# vGPU: fractions of a GPU as `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`.

log = structlog.get_logger()


class VgpuPlugin(SharedPairPlugin):
    def __init__(
        self,
        shares: SharedPair,
        member: PairMember,
        injector: Injector,
        inventory: Cell[Snapshot],
        enforcement: str = "off",
        library: str | None = None,
    ) -> None:
        """`enforcement`: the node's policy. `library`: that of `vgpu.library`, None: the agent's own."""
        self._hooked = hooked(enforcement, library)
        self._snapshot = inventory
        self._enforcement = enforcement
        super().__init__(shares, member, injector)

    async def run(self) -> None:
        """Keep the list true; the core member logs what is to be known of the mode."""
        async with anyio.create_task_group() as group:
            group.start_soon(super().run)
            if self._member is PairMember.CORE:
                log.info("vgpu_in_use", enforcement=self._enforcement)
                if self._hooked:
                    group.start_soon(self._warn)

    async def _warn(self) -> None:
        known: Driver | None = None
        async for snapshot in self._snapshot.values():
            if snapshot.driver != known:
                known = snapshot.driver
                if warning := vgpu_warning(known):
                    log.warning("cuda_baseline", problem=warning)


class VgpuSharing(Sharing):
    """Limits of containers, and units that they have grown by."""

    def __init__(self, limits: NodeLimits, *, trim: bool) -> None:
        super().__init__(VGPU, Mode.VGPU, trim=trim)
        self._limits = limits

    def grown(self, uuid: str) -> frozenset[str]:
        return self._limits.isolation.grown.get(uuid, frozenset())

    async def additions(
        self,
        member: PairMember,
        grant: Grant,
        gpus: Sequence[Gpu],  # noqa: ARG002
    ) -> Allocation:
        """Raises Refused, and what beginning of the limits raises."""
        if self._limits.enforcement is Enforcement.OFF:
            return Allocation()
        try:
            await self._limits.begin()
        except TimeoutError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        return await self._limits.additions(member, grant)


def build(node: Node, limits: NodeLimits) -> tuple[SharedPair, list[VgpuPlugin]]:
    """Both resources."""
    settings, inventory = node.settings, node.snapshot
    configured = settings.vgpu
    pairing = pairing_of(node, VGPU, configured.placement, configured.reservation_seconds)
    sharing = VgpuSharing(limits, trim=not settings.cluster.extender)
    shares = SharedPair(sharing, inventory, node.assignment, pairing, node.holdings.cell)
    return shares, [
        VgpuPlugin(shares, member, node.injector, inventory, configured.enforcement, configured.library)
        for member in PairMember
    ]


class VgpuWing(Wing):
    mode: ClassVar[Mode] = Mode.VGPU

    def __init__(self, node: Node) -> None:
        self._node = node
        self.limits = NodeLimits(node)
        self._shares, self._plugins = build(node, self.limits)

    @classmethod
    def checks(cls, settings: Settings, machine: Machine) -> Iterator[Look]:
        if not settings.modes.vgpu:
            return
        hooks = hooked(settings.vgpu.enforcement, settings.vgpu.library)
        if machine.gpus and hooks and (warning := vgpu_warning(machine.driver)):
            yield Look.warning("mode vgpu", warning)
        if Enforcement(settings.vgpu.enforcement).enforces:
            if problem := library.obstacle(machine.state):
                yield Look.failed("vGPU limits", problem)
            else:
                found = f"containers can load the enforcement library from below {machine.state}"
                yield Look.ok("vGPU limits", found)

    @classmethod
    async def leave(cls, settings: Settings, nvml: NvmlPort) -> None:
        """Nothing of it runs without the agent, and all of its files are among `needed_by_holders`."""

    @classmethod
    def needed_by_holders(cls, settings: Settings) -> Sequence[Path]:
        """Limits, their copies, the library, and the CDI devices by which the driver limits memory."""
        host = settings.host
        state = Path(host.state)
        limits = (state / FOLDER, *roots(Path(host.run)).values())
        return (state / library.LIBRARY_FOLDER, *limits, Path(host.cdi) / memory_limits.FILE)

    @classmethod
    async def build(cls, node: Node) -> Self:
        """Limits begin at once where containers have some already; see `agent.vgpu.node_limits`."""
        made = cls(node)
        if await made.limits.given_before():
            await made.limits.begin()
        return made

    def tasks(self) -> Sequence[Task]:
        """Those of limits, where they have begun; else one that waits for the first GPU that is offered.

        That one is there even where vGPU is not allowed: a reload may allow it.
        """
        if self.limits.begun:
            return self.limits.tasks(self._shares)
        off = self.limits.enforcement is Enforcement.OFF
        return () if off else (Task("vgpu limits", self._limit_when_offered),)

    async def _limit_when_offered(self) -> None:
        await self._node.assignment.wait_for(lambda _: self._node.offers(self.mode))
        await self.limits.begin()
        async with anyio.create_task_group() as group:
            for task in self.limits.tasks(self._shares):
                group.start_soon(self._node.supervisor.restarting, task.name, task.run)

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self._plugins

    def enforced(self) -> str:
        return self.limits.enforced()

    def holder_facts(self, holding: Holding, uuid: str) -> Document:
        if self.limits.enforcement is Enforcement.OFF or holding.resource != VGPU.memory:
            return {}
        place = Place(holding.namespace, holding.pod, holding.container, uuid)
        return {"limits": self.limits.publisher.document(place)}

    def allotted(self) -> Mapping[PlaceOfContainer, float]:
        shares = self.limits.publisher.shares()
        return {place: share.allotted / 100 for place, share in shares.items()}

    def remarks(self) -> Sequence[str]:
        problem = self.limits.problem
        if problem and self._node.offers(self.mode):
            return [f"vGPU containers start without the enforcement library: {problem}"]
        return ()

    def metrics(self) -> Iterator[Series]:
        pairing = self._shares.pairing
        yield from pairs_collector(self.mode.value, pairing.stats, pairing.waiting, self.limits.fences())
        if self.limits.begun and self.limits.enforcement is not Enforcement.OFF:
            yield from self.limits.publisher.metrics()
            grown = by_gpu(self._node.grown.value)
            for state in self._node.snapshot.value.gpus:
                if self._node.assignment.value.of(state.uuid).mode is self.mode:
                    growth = grown.get(state.uuid, Growth())
                    yield d.GROWN_MEMORY, growth.memory_bytes, (state.uuid, str(state.gpu.index))
