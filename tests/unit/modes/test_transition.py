"""One GPU's way from mode to mode: every step, and that any order of events ends where it shall."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.modes import OFF, GpuMode, Mode, Offering
from agent.modes.transition import (
    WORKING,
    ModeStage,
    ModeState,
    failed,
    first_seen,
    looked,
    offered,
    set_up,
    stopped,
    torn_down,
    tried_again,
    wanted,
)

PGPU, VGPU, MPS = GpuMode(Mode.PGPU), GpuMode(Mode.VGPU), GpuMode(Mode.MPS)
SLICED = GpuMode(Mode.PGPU, replicas=4)


def standing(mode: GpuMode) -> ModeState:
    return offered(set_up(wanted(first_seen(None), mode)))


def stages(state: ModeState, *events: Callable[[ModeState], ModeState]) -> list[ModeStage]:
    """The stages that a GPU goes through."""
    seen = [state.stage]
    for event in events:
        state = event(state)
        seen.append(state.stage)
    return seen


def free(state: ModeState) -> ModeState:
    return looked(state, held=False, granted=False)


def held(state: ModeState) -> ModeState:
    return looked(state, held=True, granted=False)


def test_an_idle_gpu_goes_from_mode_to_mode() -> None:
    way = stages(standing(PGPU), lambda state: wanted(state, MPS), free, torn_down, set_up, offered)
    assert way == [
        ModeStage.OFFERED,
        ModeStage.CLOSING,
        ModeStage.TEARING_DOWN,
        ModeStage.SETTING_UP,
        ModeStage.READY,
        ModeStage.OFFERED,
    ]


def test_no_free_id_leaves_a_list_while_an_allocation_may_be_under_way() -> None:
    closing = wanted(standing(PGPU), VGPU)
    assert closing.listed == GpuMode(Mode.PGPU, Offering.CLOSING, closing.listed.reason)
    assert looked(closing, held=True, granted=True) is closing
    draining = held(closing)
    assert (draining.stage, draining.listed.offering) == (ModeStage.DRAINING, Offering.CLOSED)
    assert held(draining) is draining
    assert free(draining).stage is ModeStage.TEARING_DOWN


def test_a_request_that_is_taken_back_before_anything_ended_sells_at_once() -> None:
    for state in (wanted(standing(MPS), PGPU), held(wanted(standing(MPS), PGPU))):
        assert wanted(state, MPS) == standing(MPS)


def test_a_set_up_that_nobody_wants_any_more_is_taken_down() -> None:
    setting_up = torn_down(free(wanted(standing(PGPU), MPS)))
    assert (setting_up.stage, setting_up.running) == (ModeStage.SETTING_UP, Mode.MPS)
    for state in (setting_up, set_up(setting_up)):
        ending = wanted(state, VGPU)
        assert (ending.stage, ending.running, ending.listed.mode) == (
            ModeStage.TEARING_DOWN,
            Mode.MPS,
            Mode.OFF,
        )
        assert torn_down(ending).running is Mode.VGPU
        assert torn_down(wanted(ending, OFF)).stage is ModeStage.OFF


def test_a_failed_set_up_goes_back_and_is_tried_again() -> None:
    setting_up = torn_down(free(wanted(standing(SLICED), MPS)))
    back = failed(setting_up, "no program")
    assert (back.stage, back.running, back.failure) == (ModeStage.GOING_BACK, Mode.PGPU, "no program")
    again = set_up(back)
    assert again.listed == SLICED
    assert not again.reached
    assert wanted(again, MPS) is again  # nothing new
    assert tried_again(again).stage is ModeStage.CLOSING
    done = offered(set_up(torn_down(free(tried_again(again)))))
    assert done == standing(MPS)
    off = failed(back, "no memory")
    assert (off.stage, off.listed.reason) == (ModeStage.OFF, "no program; and back again: no memory")
    assert tried_again(off).stage is ModeStage.SETTING_UP
    assert wanted(off, PGPU).failure == ""


def test_pods_of_before_keep_their_ids_listed_whatever_fails() -> None:
    seen = first_seen(MPS)
    assert seen.listed.mode is Mode.MPS
    setting_up = wanted(seen, MPS)
    assert (setting_up.stage, setting_up.listed.offering) == (ModeStage.SETTING_UP, Offering.CLOSED)
    resting = failed(setting_up, "it hangs")
    assert (resting.stage, resting.listed.mode, resting.resting) == (ModeStage.DRAINING, Mode.MPS, True)
    assert free(resting) is resting
    assert offered(set_up(tried_again(resting))) == standing(MPS)
    # What runs for them is ended, though nobody knows by then whether anything does.
    assert free(wanted(resting, PGPU)).running is Mode.MPS


def test_what_pods_of_before_need_is_kept_up_whatever_is_wanted() -> None:
    """Storm 90012: after a reboot nobody knew what was wanted, and pods had no MPS daemon any more."""
    seen = first_seen(MPS)
    keeping = wanted(held(seen), PGPU)
    assert (keeping.stage, keeping.running, keeping.listed.offering) == (
        ModeStage.KEEPING,
        Mode.MPS,
        Offering.CLOSED,
    )
    kept = set_up(keeping)
    assert (kept.stage, kept.running) == (ModeStage.DRAINING, Mode.MPS)
    assert wanted(kept, MPS) == standing(MPS)
    assert wanted(keeping, MPS).stage is ModeStage.SETTING_UP
    # Asked for and given up again before it was there.
    assert wanted(wanted(seen, MPS), PGPU).stage is ModeStage.KEEPING
    without = failed(keeping, "no program")
    assert (without.stage, without.running, without.failure) == (ModeStage.DRAINING, Mode.OFF, "")
    for state in (seen, keeping, kept, without):
        assert (free(state).stage, free(state).running) == (ModeStage.TEARING_DOWN, Mode.MPS)


def test_an_agent_that_stops_keeps_its_ids_listed() -> None:
    ending = stopped(standing(PGPU))
    assert ending.listed == GpuMode(Mode.PGPU, Offering.CLOSING, "the agent is stopping")
    assert stopped(wanted(standing(PGPU), OFF)).stage is ModeStage.CLOSING


TARGETS = [OFF, PGPU, SLICED, VGPU, MPS, GpuMode(reason="cordoned", refused=True)]
EVENTS: list[Callable[[ModeState], ModeState]] = [
    *(lambda state, target=target: wanted(state, target) for target in TARGETS),
    free,
    held,
    lambda state: looked(state, held=True, granted=True),
    torn_down,
    set_up,
    lambda state: failed(state, "no"),
    tried_again,
    offered,
]


@given(
    st.sampled_from([first_seen(None), first_seen(PGPU), first_seen(MPS)]),
    st.lists(st.sampled_from(EVENTS), max_size=60),
    st.sampled_from(TARGETS),
)
def test_any_order_of_events_ends_in_the_last_request(
    state: ModeState, events: list[Callable[[ModeState], ModeState]], target: GpuMode
) -> None:
    for event in events:
        before, state = state, event(state)
        # Never from one list to another without being on none; what is offered runs.
        if before.mode is not Mode.OFF:
            assert state.mode in (before.mode, Mode.OFF)
        if state.stage is ModeStage.OFFERED:
            assert state.running is state.mode is not Mode.OFF
        if state.stage is ModeStage.OFF:
            assert (state.mode, state.running) == (Mode.OFF, Mode.OFF)
        if state.stage in WORKING or state.stage is ModeStage.READY:
            assert state.running is not Mode.OFF
    state = wanted(state, target)
    for _ in range(3):
        for event in (tried_again, free, torn_down, set_up, offered):
            state = event(state)
    assert state.reached
    assert (state.listed.mode, state.listed.offered) == (target.mode, True)
    assert replace(state, target=OFF).failure == ""


@pytest.mark.parametrize("event", [torn_down, set_up, offered, tried_again, free, held])
def test_what_concerns_another_stage_changes_nothing(event: Callable[[ModeState], ModeState]) -> None:
    state = standing(PGPU)
    assert event(state) is state


def test_a_gpu_that_drains_waits_for_a_grant_that_no_record_shows_yet() -> None:
    draining = held(wanted(standing(VGPU), PGPU))
    assert draining.stage is ModeStage.DRAINING
    assert looked(draining, held=False, granted=True) is draining
    assert free(draining).stage is ModeStage.TEARING_DOWN
