"""Limits of vGPU containers, whose rooms are loaded when the first GPU is offered as vGPU.

A node whose GPUs are all in other modes does not import them. Where containers were given limits before the
agent started they are loaded at once: units that containers have grown by must be on no list.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.to_thread

from agent.app.mode_parts import ModeContext
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.kubelet.podresources import Holding
from agent.lists.shared_pair import SharedPair
from agent.model.ledger import PairMember
from agent.model.modes import Assignment, Mode
from agent.pairing.pair_rules import Grant

if TYPE_CHECKING:
    from agent.app.build_isolation import LimitParts

# Building loads code and reads some small files; a disk that hangs would keep Allocate, and a stop, waiting.
BUILD_SECONDS = 15.0
NO_FENCES = dict.fromkeys(("driver", "library", "sweep"), False)


class Grown(Protocol):
    """Units of memory that containers were resized to, beyond those of the kubelet."""

    def units_grown(self, uuid: str) -> frozenset[str]:
        """Units of a GPU that containers have grown by: nobody else may be offered them."""

    def follow_resizes(self, context: ModeContext, shares: SharedPair) -> None:
        """Start what keeps grown units out of the pools, and resizes containers where that is allowed."""


class VgpuLimits:
    """As agent.app.mode_parts.Limits, and as the fence of agent.lists.shared_pair."""

    def __init__(self, modes: Cell[Assignment], build: Callable[[], Awaitable["LimitParts"]]) -> None:
        """`build` makes the rooms, and starts their tasks."""
        self.parts: LimitParts | None = None
        self._modes = modes
        self._build = build
        self._turn = anyio.Lock()

    async def begin(self) -> "LimitParts":
        """Have the rooms now, if they are not there yet. An Allocate that is cut off does not stop it.

        Raises TimeoutError, and what building raises: the next call builds them again.
        """
        async with self._turn:
            if self.parts is None:
                with anyio.move_on_after(BUILD_SECONDS, shield=True):
                    self.parts = await self._build()
            if self.parts is None:
                raise TimeoutError(
                    f"the limits of vGPU containers were not there within {BUILD_SECONDS:g} s; look whether "
                    "the folders host.state and host.run answer"
                )
            return self.parts

    async def __call__(self, member: PairMember, grant: Grant) -> Allocation:
        """See agent.lists.shared_pair.Sharing. Raises Refused, and what building raises."""
        try:
            parts = self.parts or await self.begin()
        except TimeoutError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        return await parts.fence(member, grant)

    def follow_resizes(self, context: ModeContext, shares: SharedPair) -> None:
        """Once a GPU is offered as vGPU."""

        async def follow() -> None:
            await self._modes.wait_for(lambda now: any(each.mode is Mode.VGPU for each in now.gpus.values()))
            (await self.begin()).follow_resizes(context, shares)
            await anyio.sleep_forever()

        if self.parts:
            self.parts.follow_resizes(context, shares)
        else:
            context.tasks.start("vgpu limits", follow)  # what cannot be loaded must not end the agent

    def units_grown(self, uuid: str) -> frozenset[str]:
        return self.parts.units_grown(uuid) if self.parts else frozenset()

    # Nothing of the following is so before the first GPU is offered.

    @property
    def problem(self) -> str | None:
        """Why containers start without the library, though they should have it; None: they have it."""
        return self.parts.problem if self.parts else None

    def fences(self) -> Mapping[str, bool]:
        return self.parts.fences() if self.parts else NO_FENCES

    def enforced(self) -> str:
        return word_of(self.fences(), computes=self.parts is not None and self.parts.computes)

    def allotted(self) -> Mapping[tuple[str, str, str, str], float]:
        return self.parts.allotted() if self.parts else {}

    def document(self, holding: Holding, gpu: str) -> Mapping[str, Any] | None:
        return self.parts.document(holding, gpu) if self.parts else None


def word_of(fences: Mapping[str, bool], *, computes: bool) -> str:
    """The word of agent.status.report for these fences; `computes`: the library enforces compute, too."""
    if computes and fences["library"]:
        return "yes"
    return "memory" if fences["driver"] or fences["library"] else "no"


async def build_limits(context: ModeContext) -> Grown | None:
    """The enforcement of vGPU memory, where it is configured; else what is left of one that was."""
    settings, host = context.core.settings, context.core.settings.host
    before = await anyio.to_thread.run_sync(_limited_before, Path(host.state), Path(host.run))

    async def rooms() -> ModuleType:
        name = "agent.app.build_isolation"
        return await anyio.to_thread.run_sync(import_module, name, abandon_on_cancel=True)

    async def build() -> "LimitParts":
        parts: LimitParts = await (await rooms()).build_isolation(context)
        return parts

    if settings.vgpu.enforcement != "off":  # even where vGPU is not allowed: a reload may allow it
        limits = VgpuLimits(context.node.assignment, build)
        if before:
            await limits.begin()
        return limits
    if before:
        kept: Grown = await (await rooms()).keep_limits(settings, context.core.holdings.cell, context.tasks)
        return kept
    return None


def _limited_before(state: Path, run: Path) -> bool:
    """Whether containers were given limits that may still run (`agent.vgpu`'s copies and folders)."""
    return any((state / "limits").glob("*.json")) or any((run / "limits").glob("*"))
