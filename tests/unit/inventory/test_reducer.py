"""The reducer: pure, complete, and never forgetful."""

from hypothesis import given
from hypothesis import strategies as st

from agent.inventory.reducer import LOST, Scanned, Unavailable, reduce
from agent.inventory.snapshot import Snapshot, Unreadable
from agent.model.gpu import Driver, Gpu

DRIVER = Driver("580.95.05", "13.580.95.05", (13, 0))


def gpu(number: int, index: int | None = None) -> Gpu:
    place = number if index is None else index
    return Gpu(f"GPU-{number}", place, place, f"0000:{number:02x}:00.0", "NVIDIA H200", 2**37, (9, 0))


def scanned(*numbers: int) -> Scanned:
    return Scanned(DRIVER, tuple(gpu(number, index) for index, number in enumerate(numbers)))


def test_the_first_scan_fills_the_inventory() -> None:
    after = reduce(Snapshot(), scanned(0, 1))
    assert (after.generation, after.problem, after.driver) == (1, None, DRIVER)
    assert [state.uuid for state in after.gpus] == ["GPU-0", "GPU-1"]
    assert all(state.healthy and state.cause == "" for state in after.gpus)
    assert after.by_uuid["GPU-1"] is after.gpus[1]


def test_the_same_scan_again_changes_nothing() -> None:
    before = reduce(Snapshot(), scanned(0, 1))
    assert reduce(before, scanned(0, 1)) is before


def test_a_gpu_that_vanishes_stays_known_as_lost_and_takes_its_place_again() -> None:
    before = reduce(Snapshot(), scanned(0, 1, 2))
    lost = reduce(before, scanned(0, 2))
    assert [(state.uuid, state.healthy) for state in lost.gpus] == [
        ("GPU-0", True),
        ("GPU-2", True),
        ("GPU-1", False),
    ]
    assert LOST in lost.by_uuid["GPU-1"].cause
    back = reduce(lost, scanned(0, 1, 2))
    assert [state.uuid for state in back.gpus] == ["GPU-0", "GPU-1", "GPU-2"]


def test_one_gpu_that_cannot_be_described_hides_no_other() -> None:
    sick = Scanned(DRIVER, (gpu(0),), (Unreadable(1, "NVML nvmlDeviceGetUUID failed"),))
    after = reduce(Snapshot(), sick)
    assert [state.healthy for state in after.gpus] == [True]
    assert after.problem is None
    assert after.unreadable == (Unreadable(1, "NVML nvmlDeviceGetUUID failed"),)


def test_without_nvml_every_known_gpu_is_unhealthy_and_stays_known() -> None:
    before = reduce(Snapshot(), scanned(0, 1))
    after = reduce(before, Unavailable("the library is gone"))
    assert after.problem == "the library is gone"
    assert [(state.uuid, state.healthy, state.cause) for state in after.gpus] == [
        ("GPU-0", False, "the library is gone"),
        ("GPU-1", False, "the library is gone"),
    ]
    assert reduce(after, Unavailable("the library is gone")) is after
    assert [state.healthy for state in reduce(after, scanned(0, 1)).gpus] == [True, True]


messages: st.SearchStrategy[Scanned | Unavailable] = st.one_of(
    st.lists(st.integers(0, 5), unique=True, max_size=6).map(lambda numbers: scanned(*numbers)),
    st.sampled_from(["no library", "no driver"]).map(Unavailable),
)


@given(st.lists(messages, max_size=30))
def test_over_any_history(history: list[Scanned | Unavailable]) -> None:
    snapshot = Snapshot()
    known: set[str] = set()
    ever_lost: set[str] = set()
    for message in history:
        after = reduce(snapshot, message)
        changed = after is not snapshot
        assert after.generation == snapshot.generation + changed
        assert changed == (after != snapshot)
        if isinstance(message, Scanned):
            present = {one.uuid for one in message.gpus}
            known |= present
            healthy = {state.uuid for state in after.gpus if state.healthy}
            assert healthy <= present  # one that came back may have to prove itself first
            assert healthy >= present - ever_lost
            ever_lost |= known - present
            assert after.problem is None
        else:
            assert after.problem == message.problem
            assert not any(state.healthy for state in after.gpus)
        assert {state.uuid for state in after.gpus} == known == set(after.by_uuid)
        assert all(bool(state.cause) == (not state.healthy) for state in after.gpus)
        assert all(after.by_uuid[state.uuid] is state for state in after.gpus)
        snapshot = after
