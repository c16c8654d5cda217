"""vGPU: fractions of a GPU as `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`."""

from collections.abc import Callable

import anyio
import structlog

from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.lists.context import PluginContext, pairing_of
from agent.lists.shared_pair import Fence, SharedPair, SharedPairPlugin, Sharing, no_fence, none_grown
from agent.model.compat import hooked, vgpu_warning
from agent.model.demand import VGPU
from agent.model.gpu import Driver
from agent.model.ledger import PairMember
from agent.model.modes import Mode

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


def build(
    context: PluginContext,
    fence: Fence = no_fence,
    grown: Callable[[str], frozenset[str]] = none_grown,
) -> tuple[SharedPair, list[VgpuPlugin]]:
    settings, inventory = context.settings, context.inventory
    configured = settings.vgpu
    pairing = pairing_of(context, VGPU, configured.placement, configured.reservation_seconds)
    sharing = Sharing(VGPU, Mode.VGPU, not settings.cluster.extender, fence=fence, grown=grown)
    shares = SharedPair(sharing, inventory, context.modes, pairing, context.record.cell)
    return shares, [
        VgpuPlugin(shares, member, context.injector, inventory, configured.enforcement, configured.library)
        for member in PairMember
    ]
