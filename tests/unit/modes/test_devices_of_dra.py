"""A GPU that is a device of DRA: its claims choose its mode while it stays on its list of devices."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.model.modes import OFF, SHARES, UNCLAIMED, WHOLE_GPUS, GpuMode, Mode, Offering
from agent.modes import transition
from agent.modes.desired import ClaimRequests
from agent.modes.planner import must_drain, summary
from agent.modes.transition import ModeStage, ModeState, wanted
from agent.modes.withholding import Cordon, cordoned, without

GPU = "GPU-1"
FREE = GpuMode(UNCLAIMED, dra=True)
SHARED, WHOLE = GpuMode(SHARES, dra=True), GpuMode(WHOLE_GPUS, dra=True)
BY_PLUGIN = GpuMode(SHARES)
PREPARING = frozenset({SHARES})


def settled(state: ModeState, watch: Callable[[ModeState], None] = lambda _: None) -> ModeState:
    """After all work that its stages ask for; nobody holds it."""
    for _ in range(20):
        watch(state)
        before = state
        match state.stage:
            case ModeStage.CLOSING | ModeStage.DRAINING | ModeStage.KEEPING if not state.stands_as_wanted:
                state = transition.looked(state, held=False, granted=False)
            case ModeStage.TEARING_DOWN:
                state = transition.torn_down(state)
            case ModeStage.SETTING_UP | ModeStage.GOING_BACK:
                state = transition.set_up(state)
            case ModeStage.READY:
                state = transition.offered(state)
        if state == before:
            return state
    raise AssertionError(f"it never settles: {state}")


def at(target: GpuMode) -> ModeState:
    state = settled(wanted(ModeState(), target))
    assert state.reached
    return state


@pytest.mark.parametrize("before", [FREE, SHARED, WHOLE])
@pytest.mark.parametrize("after", [FREE, SHARED, WHOLE])
def test_claims_choose_while_the_device_stays_offered(before: GpuMode, after: GpuMode) -> None:
    seen: list[ModeState] = []
    state = settled(wanted(at(before), after), seen.append)
    assert state.reached
    assert (state.mode, state.running) == (after.mode, after.mode)
    assert all(each.listed.claimable and not each.listed.offered for each in seen)
    assert all(each.listed.plugin_mode is Mode.OFF for each in seen)
    if before.mode is SHARES is not after.mode:
        assert any((each.stage, each.running) == (ModeStage.TEARING_DOWN, SHARES) for each in seen)


def test_a_claim_waits_for_the_end_of_what_is_being_torn_down() -> None:
    """Storm 8500036: its daemon ended under it, and then the GPU went to another mode."""
    ending = wanted(at(SHARED), FREE)
    again = wanted(ending, SHARED)
    for state in (ending, again):
        assert (state.stage, state.listed) == (ModeStage.TEARING_DOWN, FREE)
    assert transition.torn_down(again).listed == FREE
    assert settled(again) == at(SHARED)


@pytest.mark.parametrize("after", [FREE, WHOLE])
def test_a_set_up_that_nobody_wants_any_more_is_torn_down(after: GpuMode) -> None:
    state = wanted(at(FREE), SHARED)
    assert (state.stage, state.running, state.mode) == (ModeStage.SETTING_UP, SHARES, UNCLAIMED)
    state = wanted(state, after)
    assert (state.stage, state.running) == (ModeStage.TEARING_DOWN, SHARES)
    assert settled(state).mode is after.mode


def test_a_set_up_that_fails_leaves_the_device_and_says_why() -> None:
    state = transition.failed(wanted(at(FREE), SHARED), "no program")
    assert (state.stage, state.mode, state.reached) == (ModeStage.OFFERED, UNCLAIMED, False)
    assert state.listed.reason == "no program"
    again = transition.tried_again(state)
    assert (again.stage, again.running) == (ModeStage.SETTING_UP, SHARES)
    assert settled(again).reached
    assert settled(wanted(state, FREE)) == at(FREE)
    assert settled(wanted(state, WHOLE)).mode is WHOLE_GPUS


@pytest.mark.parametrize("before", [FREE, SHARED, WHOLE])
@pytest.mark.parametrize("after", [BY_PLUGIN, GpuMode(WHOLE_GPUS), OFF])
def test_a_door_is_left_like_a_mode(before: GpuMode, after: GpuMode) -> None:
    state = wanted(at(before), after)
    assert state.stage is ModeStage.CLOSING
    assert state.listed.dra
    assert not state.listed.claimable
    held = transition.looked(state, held=True, granted=False)
    assert held.stage is ModeStage.DRAINING
    assert transition.looked(held, held=True, granted=False) == held
    assert not held.listed.claimable
    assert settled(wanted(held, before)).mode is before.mode  # it was wanted back in time
    seen: list[ModeState] = []
    state = settled(held, seen.append)
    assert state.reached
    assert not state.dra
    if before.mode is SHARES:
        assert any((each.stage, each.running) == (ModeStage.TEARING_DOWN, SHARES) for each in seen)


@pytest.mark.parametrize("before", [BY_PLUGIN, GpuMode(WHOLE_GPUS), GpuMode(WHOLE_GPUS, replicas=4)])
def test_a_door_is_entered_like_a_mode(before: GpuMode) -> None:
    state = wanted(at(before), FREE)
    assert state.stage is ModeStage.CLOSING
    assert not state.listed.dra
    assert transition.looked(state, held=True, granted=False).stage is ModeStage.DRAINING
    assert settled(state).listed == FREE


def test_leaving_in_the_middle_of_a_set_up_tears_it_down() -> None:
    state = wanted(wanted(at(FREE), SHARED), GpuMode(WHOLE_GPUS))
    assert state.stage is ModeStage.CLOSING
    state = transition.looked(state, held=False, granted=False)
    assert (state.stage, state.running) == (ModeStage.TEARING_DOWN, SHARES)


def test_a_mode_that_cannot_be_set_up_goes_back_to_the_door() -> None:
    state = transition.looked(wanted(at(FREE), BY_PLUGIN), held=False, granted=False)
    state = transition.failed(transition.torn_down(state), "no program")
    assert state.stage is ModeStage.GOING_BACK
    assert transition.set_up(state).listed == FREE


def test_holders_of_before_are_taken_over() -> None:
    state = transition.first_seen(SHARED)
    assert (state.stage, state.dra) == (ModeStage.KEEPING, True)
    adopted = wanted(state, SHARED)
    assert (adopted.stage, adopted.running) == (ModeStage.SETTING_UP, SHARES)
    assert settled(adopted) == at(SHARED)
    listed = transition.first_seen(FREE)
    assert settled(wanted(listed, FREE)) == at(FREE)
    assert settled(wanted(listed, SHARED)) == at(SHARED)
    assert wanted(listed, BY_PLUGIN).stage is ModeStage.KEEPING
    # Until nobody holds it by the record: the ledger of claims may not have been readable yet.
    assert wanted(state, FREE).stage is ModeStage.KEEPING
    assert settled(wanted(state, FREE)) == at(FREE)


def test_a_cordon_taints_a_device_and_leaves_it_where_it_is() -> None:
    (target,) = cordoned({GPU: SHARED}, {GPU: object()}, {GPU: Cordon("fan")}).values()  # type: ignore[dict-item]
    assert target == replace(SHARED, offering=Offering.CLOSED, reason="cordoned: fan")
    state = wanted(at(SHARED), target)
    assert state.stage is ModeStage.OFFERED
    assert (state.listed.dra, state.listed.claimable, state.listed.reason) == (True, False, "cordoned: fan")
    assert wanted(state, SHARED) == at(SHARED)
    assert without({GPU: FREE}, {GPU: "a process"})[GPU].dra


def test_the_agents_end_takes_devices_away_from_claims() -> None:
    state = transition.stopped(at(SHARED))
    assert state.listed.dra
    assert not state.listed.claimable


def test_claims_choose_nothing_where_plugins_offer() -> None:
    requests = ClaimRequests()
    requests.wanted.publish({GPU: SHARES, "GPU-2": SHARES})
    targets = requests.chosen({GPU: FREE, "GPU-2": GpuMode(WHOLE_GPUS), "GPU-3": FREE})
    assert targets == {GPU: SHARED, "GPU-2": GpuMode(WHOLE_GPUS), "GPU-3": FREE}
    closed = replace(FREE, offering=Offering.CLOSED, reason="cordoned")
    assert requests.chosen({GPU: closed})[GPU].mode is SHARES
    requests.idle.publish(frozenset({GPU}))  # its daemon is kept for the next claim, and none comes now
    assert requests.chosen({GPU: closed})[GPU].mode is UNCLAIMED
    assert requests.holds(GPU, leaving=False)
    requests.listed.publish(frozenset({"GPU-3"}))
    assert [requests.holds("GPU-3", leaving=each) for each in (False, True)] == [False, True]


def test_a_gpu_keeps_the_mode_of_its_claims_over_a_restart() -> None:
    """Though it shall leave, and no other record has the claims of pods that were deleted by force."""
    requests = ClaimRequests()
    requests.wanted.publish({GPU: SHARES})
    requests.listed.publish(frozenset({GPU, "GPU-2"}))
    assert requests.left("GPU-2") == GpuMode(UNCLAIMED, dra=True)
    assert requests.left("GPU-3") is None
    state = wanted(transition.first_seen(requests.left(GPU)), BY_PLUGIN)
    assert (state.stage, state.mode, state.running) == (ModeStage.KEEPING, SHARES, SHARES)


def test_a_choice_of_claims_is_no_change_of_the_nodes_mode() -> None:
    assert not must_drain(SHARED, FREE)
    assert must_drain(SHARED, BY_PLUGIN)
    assert must_drain(BY_PLUGIN, FREE)
    assert summary({"a": SHARED, "b": FREE, "c": WHOLE}) == "3 GPU(s) dra"
