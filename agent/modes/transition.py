"""One GPU on its way from mode to mode: its state, and the pure functions by which it changes.

OFFERED -> CLOSING -> (DRAINING ->) TEARING_DOWN -> SETTING_UP -> READY -> OFFERED, and OFF where nothing is
wanted. A set-up that fails goes back to the mode before (GOING_BACK -> OFFERED), or leaves the GPU OFF. A GPU
that pods held before this process began is kept up for them, wanted or not (KEEPING -> DRAINING).
The same object comes back where an event changes nothing.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from agent.model.modes import OFF, GpuMode, Mode, Offering

BETWEEN: Final = "between two modes"
CHANGING: Final = "the GPU is changing its mode"
STOPPING: Final = "the agent is stopping"
UNSEEN: Final = GpuMode(reason="the GPU has just been found")
TAKEN_OVER: Final = "taken over from before"


class ModeStage(Enum):
    OFF = "off"  # offered by nobody
    OFFERED = "offered"
    CLOSING = "closing"  # offers nothing more; all IDs are listed until no allocation can be under way
    DRAINING = "draining"  # the IDs that are held are listed; waits for their holders
    TEARING_DOWN = "tearing_down"  # what runs for a mode is ended
    SETTING_UP = "setting_up"  # what the target needs is started
    READY = "ready"  # the target is set up, and offered with the next publication
    GOING_BACK = "going_back"  # its set-up failed: what was offered before is set up again
    KEEPING = "keeping"  # as draining, and what its holders need is found or started


# Stages in which a task of the GPU is at work.
WORKING: Final = frozenset(
    {ModeStage.TEARING_DOWN, ModeStage.SETTING_UP, ModeStage.GOING_BACK, ModeStage.KEEPING}
)
# Those in which somebody may have to end before it goes on.
LEAVING: Final = frozenset({ModeStage.CLOSING, ModeStage.DRAINING, ModeStage.KEEPING})


@dataclass(frozen=True, slots=True)
class ModeState:
    """One GPU. `target` is what it shall be offered as."""

    stage: ModeStage = ModeStage.OFF
    target: GpuMode = UNSEEN
    mode: Mode = Mode.OFF  # on whose lists it stands
    replicas: int = 1
    running: Mode = Mode.OFF  # for which mode something is set up, or being set up
    before: GpuMode = OFF  # what was offered until this change began
    failure: str = ""  # why the target could not be set up last

    @property
    def listed(self) -> GpuMode:
        """As what the plugins list it."""
        if self.mode is Mode.OFF:
            if self.target.mode is Mode.OFF:
                return GpuMode(reason=self.target.reason, refused=self.target.refused)
            return GpuMode(reason=self.failure or BETWEEN)
        if self.stage is ModeStage.OFFERED:
            return GpuMode(self.mode, replicas=self.replicas)
        offering = Offering.CLOSING if self.stage is ModeStage.CLOSING else Offering.CLOSED
        return GpuMode(self.mode, offering, self.target.reason or self.failure or CHANGING, self.replicas)

    @property
    def reached(self) -> bool:
        """Whether it is offered, or not offered, as wanted."""
        if self.target.mode is Mode.OFF:
            return self.stage is ModeStage.OFF
        return self.stage is ModeStage.OFFERED and self.stands_as_wanted

    @property
    def resting(self) -> bool:
        """Whether nothing happens to it before it is tried again or something else is wanted."""
        if self.stage is ModeStage.DRAINING:
            return self.stands_as_wanted
        return self.stage in (ModeStage.OFF, ModeStage.OFFERED)

    @property
    def stands_as_wanted(self) -> bool:
        """Whether the list that it stands on is the one that is wanted."""
        return (self.mode, self.replicas) == (self.target.mode, self.target.replicas)


def first_seen(held_as: GpuMode | None) -> ModeState:
    """A GPU that was not known; `held_as`: in which mode pods hold units of it."""
    if held_as is None:
        return ModeState()
    target = replace(UNSEEN, reason=TAKEN_OVER)
    # Nobody knows yet whether what these pods need still runs.
    return ModeState(ModeStage.KEEPING, target, held_as.mode, held_as.replicas, held_as.mode)


def wanted(state: ModeState, target: GpuMode) -> ModeState:
    """It shall be offered as `target` from now on."""
    if target == state.target:
        return state
    after = replace(state, target=target, failure="")
    match state.stage:
        case ModeStage.OFF:
            return _begun(after)
        case ModeStage.OFFERED:
            return after if after.reached else _closed(after)
        case ModeStage.CLOSING | ModeStage.DRAINING:
            return _offered_again(after) if after.stands_as_wanted else after
        case ModeStage.TEARING_DOWN:
            return after
        case ModeStage.KEEPING:
            return replace(after, stage=ModeStage.SETTING_UP) if after.stands_as_wanted else after
        case ModeStage.SETTING_UP | ModeStage.READY if state.mode is not Mode.OFF:
            # It was about to be offered again as it stands listed, with its holders.
            return after if after.stands_as_wanted else replace(after, stage=ModeStage.KEEPING)
        case ModeStage.READY if state.running is target.mode:
            return after
        case ModeStage.SETTING_UP | ModeStage.READY | ModeStage.GOING_BACK:
            return replace(after, stage=ModeStage.TEARING_DOWN, before=OFF)


def looked(state: ModeState, *, held: bool, granted: bool) -> ModeState:
    """Its list has left for the kubelet, and this is who is on it: holders, and grants of this moment."""
    match state.stage:
        case ModeStage.CLOSING if not granted:
            return replace(state, stage=ModeStage.DRAINING) if held else _ended(state)
        case ModeStage.DRAINING | ModeStage.KEEPING if not (held or granted or state.stands_as_wanted):
            return _ended(state)
    return state


def torn_down(state: ModeState) -> ModeState:
    """Nothing runs for its old mode any more."""
    if state.stage is not ModeStage.TEARING_DOWN:
        return state
    return _begun(replace(state, mode=Mode.OFF, replicas=1, running=Mode.OFF))


def set_up(state: ModeState) -> ModeState:
    match state.stage:
        case ModeStage.SETTING_UP:
            return replace(state, stage=ModeStage.READY)
        case ModeStage.KEEPING:
            return replace(state, stage=ModeStage.DRAINING)
        case ModeStage.GOING_BACK:
            offered_before = state.before
            return replace(
                state,
                stage=ModeStage.OFFERED,
                mode=offered_before.mode,
                replicas=offered_before.replicas,
                before=OFF,
            )
    return state


def failed(state: ModeState, problem: str) -> ModeState:
    match state.stage:
        case ModeStage.SETTING_UP if state.mode is not Mode.OFF:
            # Pods are at work on it: their IDs stay listed, and whatever runs for them stays.
            return replace(state, stage=ModeStage.DRAINING, running=Mode.OFF, failure=problem)
        case ModeStage.KEEPING:
            return replace(state, stage=ModeStage.DRAINING, running=Mode.OFF)
        case ModeStage.SETTING_UP if state.before.mode not in (Mode.OFF, state.target.mode):
            return replace(state, stage=ModeStage.GOING_BACK, running=state.before.mode, failure=problem)
        case ModeStage.SETTING_UP:
            return replace(state, stage=ModeStage.OFF, running=Mode.OFF, failure=problem)
        case ModeStage.GOING_BACK:
            both = f"{state.failure}; and back again: {problem}"
            return replace(state, stage=ModeStage.OFF, running=Mode.OFF, before=OFF, failure=both)
    return state


def tried_again(state: ModeState) -> ModeState:
    """Another try at a target that could not be set up."""
    if not state.failure:
        return state
    match state.stage:
        case ModeStage.OFF:
            return _begun(state)
        case ModeStage.OFFERED:
            return _closed(state)
        case ModeStage.DRAINING if state.stands_as_wanted:
            return _offered_again(state)
    return state


def offered(state: ModeState) -> ModeState:
    """It stands on the lists of its target."""
    if state.stage is not ModeStage.READY:
        return state
    target = state.target
    return ModeState(ModeStage.OFFERED, target, target.mode, target.replicas, target.mode)


def stopped(state: ModeState) -> ModeState:
    """The agent ends: what is offered is offered no more."""
    if state.stage is not ModeStage.OFFERED:
        return state
    return replace(state, stage=ModeStage.CLOSING, target=replace(state.target, reason=STOPPING))


def _offered_again(state: ModeState) -> ModeState:
    """The listed mode is the wanted one: it only has to be seen to run."""
    if state.running is state.mode:
        return replace(state, stage=ModeStage.OFFERED, before=OFF)
    return replace(state, stage=ModeStage.SETTING_UP, running=state.mode)


def _ended(state: ModeState) -> ModeState:
    return replace(state, stage=ModeStage.TEARING_DOWN, running=state.mode)


def _closed(state: ModeState) -> ModeState:
    return replace(state, stage=ModeStage.CLOSING, before=GpuMode(state.mode, replicas=state.replicas))


def _begun(state: ModeState) -> ModeState:
    """Nothing runs for it: what its target needs is set up."""
    target = state.target.mode
    if target is Mode.OFF:
        return replace(state, stage=ModeStage.OFF, before=OFF)
    return replace(state, stage=ModeStage.SETTING_UP, running=target)
