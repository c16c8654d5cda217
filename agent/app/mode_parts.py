"""The inputs for building a mode, and the parts that it brings to the rest of the agent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent.app.parts import Core, Tasks
from agent.inventory.snapshot import GpuState
from agent.kubelet.plugin_types import ResourcePlugin
from agent.kubelet.podresources import Holding
from agent.modes.ports import Backend
from agent.modes.wing import Node


@dataclass(frozen=True, slots=True)
class ModeContext:
    """The node as modes are built on it."""

    core: Core
    tasks: Tasks
    node: Node


class Limits(Protocol):
    """Limits of containers, whose room is imported only where they are enforced."""

    def allotted(self) -> Mapping[tuple[str, str, str, str], float]:
        """Share of the GPU that containers may use now, 0..1; by namespace, pod, container and GPU."""

    def document(self, holding: Holding, gpu: str) -> Mapping[str, Any] | None:
        """The limits of a container, for `status`; None: it has none, and is not measured."""


@dataclass(frozen=True, slots=True)
class ModeParts:
    """A mode, ready to be switched to."""

    plugins: Sequence[ResourcePlugin]
    backend: Backend | None = None  # None: nothing has to run for it
    # Why a GPU cannot be offered in it, in words; None: it can.
    refusal: Callable[[GpuState], str | None] = lambda _: None
    # The daemon of a GPU for `status`, by UUID; None: it has none.
    daemon: Callable[[str], dict[str, Any] | None] = lambda _: None
    # Whether containers are kept to their shares, see agent.status.report; None: it has no shares by amounts.
    enforced: Callable[[], str | None] = lambda: None
    limits: Limits | None = None  # None: nothing of ours enforces them


class ModeModule(Protocol):
    """A module `build_<mode>` of this package."""

    async def build(self, context: ModeContext) -> ModeParts:
        """Build the mode and start its tasks; no resource is registered before the mode is first used."""
