"""The mode vGPU: fractions of a GPU, with limits where they are enforced."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread

from agent.kubelet.plugin_types import Allocation, Reason, Refused, ResourcePlugin
from agent.lists.context import PluginContext
from agent.lists.pairs import pairs_collector
from agent.model.growth import Growth
from agent.model.ledger import PairMember
from agent.model.modes import Mode
from agent.pairing.pair_rules import Grant
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series
from agent.vgpu import plugin
from agent.vgpu.limits import Enforcement
from agent.vgpu.node_limits import NodeLimits, Surroundings


class Vgpu:
    """The two resources and the limits of their containers."""

    mode = Mode.VGPU

    def __init__(self, context: PluginContext, node: Surroundings) -> None:
        self._context = context
        self._node = node
        self.limits = NodeLimits(node)
        self._shares, self._plugins = plugin.build(context, self.additions, self._grown)

    @classmethod
    async def build(cls, context: PluginContext, node: Surroundings) -> "Vgpu":
        """Limits begin at once where containers have some already, else with the first GPU that is offered.

        Even where vGPU is not allowed: a reload may allow it.
        """
        made = cls(context, node)
        if await made.limits.given_before():
            await made.limits.begin(made._shares)
        elif made.limits.enforcement is not Enforcement.OFF:
            node.start("vgpu limits", made._begin_when_offered)  # what cannot begin must not end the agent
        return made

    async def _begin_when_offered(self) -> None:
        await self._context.modes.wait_for(
            lambda now: any(each.mode is self.mode for each in now.gpus.values())
        )
        await self.limits.begin(self._shares)
        await anyio.sleep_forever()

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self._plugins

    async def additions(self, member: PairMember, grant: Grant) -> Allocation:
        """The part of a container's answer that is not its GPU. Raises Refused, and what beginning raises."""
        if self.limits.enforcement is Enforcement.OFF:
            return Allocation()
        try:
            await self.limits.begin(self._shares)
        except TimeoutError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        return await self.limits.additions(member, grant)

    def _grown(self, uuid: str) -> frozenset[str]:
        return self.limits.isolation.grown.get(uuid, frozenset())

    def enforced(self) -> str:
        """Whether containers are kept to their shares, see agent.status.report."""
        return self.limits.enforced()

    def allotted(self) -> Mapping[tuple[str, str, str, str], float]:
        """Share of the GPU that containers may use now, 0..1; by namespace, pod, container and GPU."""
        return self.limits.allotted()

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        """The limits of a container, for `status`; None: it has none, and is not measured."""
        return self.limits.document(namespace, pod, container, gpu)

    def remarks(self) -> list[str]:
        """Degradations, each in a sentence."""
        problem, assigned = self.limits.problem, self._context.modes.value.gpus.values()
        if problem and any(each.mode is self.mode for each in assigned):
            return [f"vGPU containers start without the enforcement library: {problem}"]
        return []

    def metrics(self) -> Iterator[Series]:
        pairing = self._shares.pairing
        yield from pairs_collector(self.mode.value, pairing.stats, pairing.waiting, self.limits.fences())
        if self.limits.measures:
            yield from self.limits.metrics()
            for state in self._context.inventory.value.gpus:
                if self._context.modes.value.of(state.uuid).mode is self.mode:
                    grown = self._node.grown.value.get(state.uuid, Growth())
                    yield d.GROWN_MEMORY, grown.memory_bytes, (state.uuid, str(state.gpu.index))
