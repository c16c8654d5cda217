"""How far the node is on its way to what is wanted: for people, the Node object, metrics and status."""

from dataclasses import dataclass
from enum import Enum

from agent.model.modes import GpuMode


class Phase(Enum):
    """The node's mode as a whole; the value stands in the state annotation."""

    APPLIED = "applied"
    SWITCHING = "switching"
    BLOCKED = "blocked"  # nothing will change until somebody acts
    FAILED = "failed"  # setting up failed; it is tried again


@dataclass(frozen=True, slots=True)
class GpuSwitch:
    """One GPU: what it is offered as, what it shall be offered as, and what stands between."""

    index: int
    uuid: str
    active: GpuMode
    wanted: GpuMode
    waiting_for: tuple[str, ...] = ()  # pods (namespace/name) that hold it in the old mode
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SwitchState:
    phase: Phase
    desired: str  # the word that was asked for
    message: str
    gpus: tuple[GpuSwitch, ...] = ()
    applied: str = "none"  # the word that was in force last

    def remarks(self) -> list[str]:
        """A request that cannot be obeyed."""
        if self.phase not in (Phase.BLOCKED, Phase.FAILED):
            return []
        return [f"mode {self.desired} is not in force: {self.message}"]


STARTING = SwitchState(Phase.SWITCHING, "none", "the agent is starting")
