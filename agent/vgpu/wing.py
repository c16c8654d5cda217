"""The wing of vGPU: fractions of a GPU, with limits where they are enforced."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import anyio

from agent.kubelet.plugin_types import ResourcePlugin
from agent.lists.pairs import pairs_collector
from agent.model.compat import hooked, vgpu_warning
from agent.model.demand import VGPU
from agent.model.growth import Growth, by_gpu
from agent.model.growth import Place as PlaceOfContainer
from agent.model.holding import Holding
from agent.model.look import Look
from agent.model.modes import Mode
from agent.modes.wing import Document, Machine, Node, Task, Wing
from agent.nvml.port import NvmlPort
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series
from agent.vgpu import library, memory_limits, plugin
from agent.vgpu.folders import FOLDER, Place, roots
from agent.vgpu.limits import Enforcement
from agent.vgpu.node_limits import NodeLimits


class VgpuWing(Wing):
    mode: ClassVar[Mode] = Mode.VGPU

    def __init__(self, node: Node) -> None:
        self._node = node
        self.limits = NodeLimits(node)
        self._shares, self._plugins = plugin.build(node, self.limits)

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
        return (state / library.FOLDER, *limits, Path(host.cdi) / memory_limits.FILE)

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
