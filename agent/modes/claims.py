"""Requests of claims, the second source beside the label: for GPUs that are devices of DRA, one by one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.kit.cell import Cell
from agent.model.modes import UNCLAIMED, GpuMode, Mode


@dataclass(frozen=True, slots=True)
class ClaimRequests:
    """The DRA door as the switcher knows it; the door publishes all cells."""

    modes: tuple[Mode, ...] = ()  # in which a GPU can be a device
    # The mode that claims on a GPU are of, by UUID. One without is anybody's.
    wanted: Cell[Mapping[str, Mode]] = field(default_factory=lambda: Cell(MappingProxyType({})))
    # Those of them that no claim is on any more, whose mode is kept for the next one.
    idle: Cell[frozenset[str]] = field(default_factory=lambda: Cell(frozenset()))
    # GPUs that stand as devices in slices, or did when that was seen last: claims may be allocated on them.
    listed: Cell[frozenset[str]] = field(default_factory=lambda: Cell(frozenset()))

    def chosen(self, targets: Mapping[str, GpuMode]) -> Mapping[str, GpuMode]:
        """The targets, with devices of DRA in the modes of their claims.

        A GPU that takes no claims now is not kept in a mode for the next one.
        """
        wanted, idle = self.wanted.value, self.idle.value
        return {
            uuid: replace(target, mode=wanted[uuid])
            if target.dra and uuid in wanted and (target.claimable or uuid not in idle)
            else target
            for uuid, target in targets.items()
        }

    def holds(self, uuid: str, *, leaving: bool) -> bool:
        """Whether a claim is on a GPU; on one that is `leaving` for another door, whether one may be."""
        return uuid in self.wanted.value or (leaving and uuid in self.listed.value)

    def left(self, uuid: str) -> GpuMode | None:
        """How an agent of before left a GPU that is no holder's by other records; None: as no device.

        What its slices list may be allocated by now. Claims of pods that were deleted by force are in the
        door's record alone: what runs for them stays until their containers have ended.
        """
        mode = self.wanted.value.get(uuid, UNCLAIMED)
        return GpuMode(mode, dra=True) if self.holds(uuid, leaving=True) else None
