"""One GPU on its way from mode to mode: its state, and the pure functions by which it changes.

OFFERED -> CLOSING -> (DRAINING ->) TEARING_DOWN -> SETTING_UP -> READY -> OFFERED, and OFF where nothing is
wanted. A set-up that fails goes back to the mode before (GOING_BACK -> OFFERED), or leaves the GPU OFF. A GPU
that pods held before this process began is kept up for them, wanted or not (KEEPING -> DRAINING).
A device of DRA stays offered as one while its claims choose another mode: OFFERED -> (TEARING_DOWN ->)
SETTING_UP -> OFFERED.
The same object comes back where an event changes nothing.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from agent.model.modes import OFF, UNCLAIMED, GpuMode, Mode, Offering

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
    dra: bool = False  # offered as a device of DRA

    @property
    def listed(self) -> GpuMode:
        """As what the plugins list it."""
        if self.claimed:
            # What ends serves no claim that comes meanwhile, though it be of the same mode.
            mode = UNCLAIMED if self.stage is ModeStage.TEARING_DOWN else self.mode
            return GpuMode(mode, self.target.offering, self.target.reason or self.failure, dra=True)
        if self.mode is Mode.OFF:
            if self.target.mode is Mode.OFF:
                return GpuMode(reason=self.target.reason, refused=self.target.refused)
            return GpuMode(reason=self.failure or BETWEEN)
        if self.stage is ModeStage.OFFERED:
            instances = self.target.instances if self.mode is self.target.mode else ()
            return GpuMode(self.mode, replicas=self.replicas, dra=self.dra, instances=instances)
        offering = Offering.CLOSING if self.stage is ModeStage.CLOSING else Offering.CLOSED
        reason = self.target.reason or self.failure or CHANGING
        return GpuMode(self.mode, offering, reason, self.replicas, dra=self.dra)

    @property
    def claimed(self) -> bool:
        """Whether it is a device of DRA, and is to stay one."""
        return self.dra and self.target.dra and self.stage not in LEAVING

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
        return (self.mode, self.replicas, self.dra) == self.target.list_key


def first_seen(held_as: GpuMode | None) -> ModeState:
    """A GPU that was not known; `held_as`: in which mode pods hold units of it."""
    if held_as is None:
        return ModeState()
    target = replace(UNSEEN, reason=TAKEN_OVER)
    # Nobody knows yet whether what these pods need still runs.
    mode = held_as.mode
    return ModeState(ModeStage.KEEPING, target, mode, held_as.replicas, mode, dra=held_as.dra)


def wanted(state: ModeState, target: GpuMode) -> ModeState:
    """It shall be offered as `target` from now on."""
    if target == state.target:
        return state
    after = replace(state, target=target, failure="")
    if state.dra:
        return _wanted_of_device(after)
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


def _wanted_of_device(after: ModeState) -> ModeState:
    """A device of DRA, with a new target: it stays one, or it is left by its claims first."""
    match after.stage:
        case ModeStage.OFFERED:
            return _chosen_anew(after) if after.claimed else _closed(after)
        case ModeStage.KEEPING if after.stands_as_wanted:
            return replace(after, stage=ModeStage.SETTING_UP)
        case ModeStage.CLOSING | ModeStage.DRAINING if after.stands_as_wanted:
            return _offered_again(after)
        case ModeStage.CLOSING | ModeStage.DRAINING | ModeStage.KEEPING:
            return _chosen_anew(after) if after.target.dra and after.mode is UNCLAIMED else after
        case ModeStage.SETTING_UP if after.claimed:
            return after if after.running is after.target.mode else _chosen_anew(after)
        case ModeStage.SETTING_UP:
            return _closed(after) if after.mode is UNCLAIMED else replace(after, stage=ModeStage.KEEPING)
    return after


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
    stays = state.claimed
    mode = UNCLAIMED if stays else Mode.OFF
    return _begun(replace(state, mode=mode, replicas=1, running=Mode.OFF, dra=stays))


def set_up(state: ModeState) -> ModeState:
    match state.stage:
        case ModeStage.SETTING_UP:
            ready = replace(state, stage=ModeStage.READY)
            return offered(ready) if state.claimed else ready  # no list has to leave first
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
                dra=offered_before.dra,
            )
    return state


def failed(state: ModeState, problem: str) -> ModeState:
    match state.stage:
        case ModeStage.SETTING_UP if state.mode is UNCLAIMED:
            return replace(state, stage=ModeStage.OFFERED, running=UNCLAIMED, failure=problem)
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
            return _chosen_anew(state) if state.claimed else _closed(state)
        case ModeStage.DRAINING if state.stands_as_wanted:
            return _offered_again(state)
    return state


def offered(state: ModeState) -> ModeState:
    """It stands on the lists of its target."""
    if state.stage is not ModeStage.READY:
        return state
    target = state.target
    return ModeState(ModeStage.OFFERED, target, target.mode, target.replicas, target.mode, dra=target.dra)


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
    # For a device of DRA more may run than it stands for: its first claim's mode was being set up.
    running = state.running if state.dra and state.running is not Mode.OFF else state.mode
    return replace(state, stage=ModeStage.TEARING_DOWN, running=running)


def _closed(state: ModeState) -> ModeState:
    before = GpuMode(UNCLAIMED, dra=True) if state.dra else GpuMode(state.mode, replicas=state.replicas)
    return replace(state, stage=ModeStage.CLOSING, before=before)


def _chosen_anew(state: ModeState) -> ModeState:
    """A device of DRA whose claims, all of them or none, are of one mode, or whose first one is."""
    stage = ModeStage.OFFERED
    if state.mode is state.target.mode and state.running in (state.mode, Mode.OFF) and not state.failure:
        return replace(state, stage=stage, before=OFF)
    if state.mode is UNCLAIMED and state.running in (UNCLAIMED, Mode.OFF):
        return _begun(replace(state, stage=stage))
    return _ended(replace(state, stage=stage, before=OFF))


def _begun(state: ModeState) -> ModeState:
    """Nothing runs for it: what its target needs is set up."""
    target = state.target.mode
    if target is Mode.OFF:
        return replace(state, stage=ModeStage.OFF, before=OFF)
    return replace(state, stage=ModeStage.SETTING_UP, running=target)
