"""vGPU: fractions of a GPU as `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`."""

from collections.abc import Sequence

import anyio
import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.lists.pairs import pairing_of
from agent.lists.shared_pair import SharedPair, SharedPairPlugin, Sharing
from agent.model.compat import hooked, vgpu_warning
from agent.model.demand import VGPU
from agent.model.gpu import Driver, Gpu
from agent.model.ledger import PairMember
from agent.model.modes import Mode
from agent.modes.wing import Node
from agent.pairing.pair_rules import Grant
from agent.vgpu.limits import Enforcement
from agent.vgpu.node_limits import NodeLimits

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
