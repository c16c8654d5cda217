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

from agent.app.agent import Agent
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import Allocation
from agent.model.ledger import PairMember
from agent.model.modes import Assignment, Mode
from agent.nvml.port import NvmlPort
from agent.pairing.ports import Recorder
from agent.pairing.reducer import Grant
from agent.plugins.inject import Injector
from agent.plugins.shared_pair import SharedPair

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agent.app.build_isolation import LimitParts

NO_FENCES: Mapping[str, bool] = dict.fromkeys(("driver", "library", "sweep"), False)


class Grown(Protocol):
    """Units of memory that containers were resized to, beyond those of the kubelet."""

    def units_grown(self, uuid: str) -> frozenset[str]:
        """See agent.app.agent.Limits."""

    def follow_resizes(self, agent: Agent, shares: SharedPair, group: "TaskGroup") -> None:
        """See agent.app.agent.Limits."""


class VgpuLimits:
    """As agent.app.agent.Limits, and as the fence of agent.plugins.shared_pair."""

    def __init__(self, modes: Cell[Assignment], build: Callable[[], Awaitable["LimitParts"]]) -> None:
        """`build` makes the rooms, and starts their tasks."""
        self.parts: LimitParts | None = None
        self._modes = modes
        self._build = build
        self._turn = anyio.Lock()

    async def begin(self) -> "LimitParts":
        """Have the rooms now, if they are not there yet. An Allocate that is cut off does not stop it."""
        async with self._turn:
            if self.parts is None:
                with anyio.CancelScope(shield=True):
                    self.parts = await self._build()
            assert self.parts
            return self.parts

    async def __call__(self, member: PairMember, grant: Grant) -> Allocation:
        """See agent.plugins.shared_pair.Sharing."""
        parts = self.parts or await self.begin()
        return await parts.fence(member, grant)

    def follow_resizes(self, agent: Agent, shares: SharedPair, group: "TaskGroup") -> None:
        """See agent.app.agent.Limits."""

        async def follow() -> None:
            await self._modes.wait_for(lambda now: any(each.mode is Mode.VGPU for each in now.gpus.values()))
            (await self.begin()).follow_resizes(agent, shares, group)

        if self.parts:
            self.parts.follow_resizes(agent, shares, group)
        else:
            group.start_soon(follow)

    def units_grown(self, uuid: str) -> frozenset[str]:
        """See agent.app.agent.Limits."""
        return self.parts.units_grown(uuid) if self.parts else frozenset()

    # As agent.app.agent.Limits, too; nothing is so before the first GPU is offered.

    @property
    def problem(self) -> str | None:
        """See there."""
        return self.parts.problem if self.parts else None

    def fences(self) -> Mapping[str, bool]:
        """See there."""
        return self.parts.fences() if self.parts else NO_FENCES

    @property
    def computes(self) -> bool:
        """See there."""
        return self.parts is not None and self.parts.computes

    def allotted(self) -> Mapping[tuple[str, str, str, str], float]:
        """See there."""
        return self.parts.allotted() if self.parts else {}

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        """See there."""
        return self.parts.document(namespace, pod, container, gpu) if self.parts else None


async def build_limits(
    agent: Agent,
    nvml: NvmlPort,
    injector: Injector,
    group: "TaskGroup",
    recorder: Recorder | None,
    modes: Cell[Assignment],
) -> Grown | None:
    """The enforcement of vGPU memory, where it is configured; else what is left of one that was."""
    settings = agent.settings
    host = settings.host
    before = await anyio.to_thread.run_sync(_limited_before, Path(host.state), Path(host.run))

    async def rooms() -> ModuleType:
        return await anyio.to_thread.run_sync(import_module, "agent.app.build_isolation")

    async def build() -> "LimitParts":
        parts: LimitParts = await (await rooms()).build_isolation(agent, nvml, injector, group, recorder)
        return parts

    if settings.modes.vgpu and settings.vgpu.enforcement != "off":
        agent.limits = limits = VgpuLimits(modes, build)
        if before:
            await limits.begin()
        return limits
    if before:
        kept: Grown = await (await rooms()).keep_limits(agent, group)
        return kept
    return None


def _limited_before(state: Path, run: Path) -> bool:
    """Whether containers were given limits that may still run (`agent.isolation`'s copies and folders)."""
    return any((state / "limits").glob("*.json")) or any((run / "limits").glob("*"))
