"""The reducer: what messages do to the inventory, and that any storm of them ends with the truth."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.inventory.reducer import (
    Accused,
    Cleared,
    KernelXidSeen,
    Probed,
    Restored,
    Scanned,
    Unavailable,
    records,
    reduce,
)
from agent.inventory.snapshot import HealthRecord, KernelXid, Snapshot, Unreadable
from agent.model.gpu import Driver, Gpu
from agent.model.health import HEALTHY, Fault, FaultKind, Health, HealthState, RecoveryAction

DRIVER = Driver("580.95.05", "13.580.95.05", (13, 0))
LOST = Fault(FaultKind.LOST)


def gpu(number: int) -> Gpu:
    return Gpu(f"GPU-{number}", number, number, f"0000:{number:02x}:00.0", "NVIDIA H200", 1 << 37, (9, 0))


GPUS = tuple(gpu(number) for number in range(4))


def scan(*gpus: Gpu, at: float = 1.0, probes: tuple[Probed, ...] | None = None) -> Scanned:
    found = probes if probes is not None else tuple(Probed(one.uuid) for one in gpus)
    return Scanned(DRIVER, gpus, probes=found, at=at)


def xid(uuid: str, number: int, at: float = 2.0) -> Accused:
    return Accused(uuid, Fault(FaultKind.XID, number), at)


def ready() -> Snapshot:
    return reduce(Snapshot(), scan(*GPUS))


def test_a_scan_that_shows_nothing_new_publishes_nothing() -> None:
    snapshot = ready()
    assert reduce(snapshot, scan(*GPUS, at=9.0)) is snapshot
    assert snapshot.generation == 1


def test_one_gpus_fault_leaves_the_others_as_they_are() -> None:
    after = reduce(ready(), xid("GPU-2", 48))
    assert [state.healthy for state in after.gpus] == [True, True, False, True]
    assert after.by_uuid["GPU-2"].cause == "Xid 48, double-bit ECC error"
    assert reduce(after, xid("GPU-unknown", 48)) is after


def test_a_gpu_that_is_not_enumerated_stays_listed_as_lost() -> None:
    after = reduce(ready(), scan(*GPUS[:3]))
    assert [state.uuid for state in after.gpus] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert not after.by_uuid["GPU-3"].healthy
    back = reduce(after, scan(*GPUS, at=5))
    assert back.by_uuid["GPU-3"].health.state is HealthState.PROBATION


def test_the_uuid_is_the_key_whatever_the_index() -> None:
    sick = reduce(ready(), xid("GPU-0", 119))
    swapped = (replace(GPUS[0], index=1, minor=1), replace(GPUS[1], index=0, minor=0), *GPUS[2:])
    after = reduce(sick, scan(*swapped))
    assert [state.uuid for state in after.gpus] == ["GPU-1", "GPU-0", "GPU-2", "GPU-3"]
    assert not after.by_uuid["GPU-0"].healthy
    assert after.by_uuid["GPU-1"].healthy


def test_an_index_that_cannot_be_read_is_told_unless_its_gpu_is_known() -> None:
    strange = replace(scan(*GPUS), unreadable=(Unreadable(7, "lost"),))
    assert reduce(Snapshot(), strange).unreadable == (Unreadable(7, "lost"),)
    known = replace(scan(*GPUS[:3]), unreadable=(Unreadable(3, "lost"),))
    assert reduce(ready(), known).unreadable == ()


def test_nvml_as_a_whole_blocks_every_gpu_and_heals_none() -> None:
    sick = reduce(ready(), xid("GPU-1", 119))
    closed = reduce(sick, Unavailable("NVML is released", released_until=99.0))
    assert not any(state.healthy for state in closed.gpus)
    assert {state.cause for state in closed.gpus} == {"NVML is released"}
    opened = reduce(closed, scan(*GPUS, at=100))
    assert [state.healthy for state in opened.gpus] == [True, False, True, True]
    assert opened.released_until is None


def test_remembered_verdicts_meet_their_gpus() -> None:
    bad = Health(HealthState.UNHEALTHY, Fault(FaultKind.XID, 119), "Xid 119", 1, 1)
    kept = (HealthRecord(GPUS[1], bad), HealthRecord(gpu(9), bad), HealthRecord(gpu(8), bad, listed=False))
    snapshot = reduce(Snapshot(), Restored(kept, (), 5))
    assert len(records(snapshot)) == 3
    after = reduce(snapshot, scan(*GPUS, at=6))
    assert not after.by_uuid["GPU-1"].healthy
    assert not after.by_uuid["GPU-9"].healthy  # it does not answer, and stays listed
    assert "GPU-8" not in after.by_uuid  # taken out of the machine before this boot
    assert {record.gpu.uuid for record in records(after)} == {"GPU-1", "GPU-9"}


def test_kernel_log_xids_find_their_gpu_by_address() -> None:
    waiting = (KernelXid("0000:01:00", 119), KernelXid("0000:02:00", 119, new=False), KernelXid("x", 1))
    after = reduce(reduce(Snapshot(), Restored((), waiting, 5)), scan(*GPUS, at=6))
    assert after.by_uuid["GPU-1"].health.state is HealthState.UNHEALTHY
    assert after.by_uuid["GPU-2"].health.state is HealthState.PROBATION  # nobody knows what was done since
    assert after.awaiting == ()
    later = reduce(after, KernelXidSeen(KernelXid("0000:03:00", 48), 7))
    assert not later.by_uuid["GPU-3"].healthy


def test_risen_ecc_counters_condemn() -> None:
    after = reduce(ready(), scan(*GPUS, probes=(Probed("GPU-0", ecc_risen=True),)))
    assert after.by_uuid["GPU-0"].health.fault == Fault(FaultKind.ECC)


class Storm(RuleBasedStateMachine):
    """Any order of events, losses, returns, closings and clearings."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.snapshot = ready()
        self.gone: set[str] = set()
        self.open = True
        self.deadly: set[str] = set()  # faults that only a reset ends

    def look(self) -> None:
        """A round of the scanner, as it would find the machine."""
        present = tuple(one for one in GPUS if one.uuid not in self.gone)
        # A driver that reports, and asks for nothing: it settles what the table of Xids leaves open.
        probes = tuple(
            Probed(one.uuid, LOST, "lost")
            if one.uuid in self.gone
            else Probed(one.uuid, action=RecoveryAction.NONE)
            for one in GPUS
        )
        before = {state.uuid for state in self.snapshot.gpus if state.health.away}
        self.snapshot = reduce(self.snapshot, scan(*present, at=self.now, probes=probes))
        self.deadly -= {uuid for uuid in before if uuid not in self.gone}
        self.open = True

    @rule(number=st.integers(0, 3), fault=st.sampled_from([13, 31, 45, 48, 63, 74, 79, 94, 95, 119, 999]))
    def strike(self, number: int, fault: int) -> None:
        self.now += 1
        uuid = f"GPU-{number}"
        self.snapshot = reduce(self.snapshot, xid(uuid, fault, self.now))
        if fault in (79, 95, 119):
            self.deadly.add(uuid)

    @rule(number=st.integers(0, 3))
    def lose(self, number: int) -> None:
        self.gone.add(f"GPU-{number}")

    @rule(number=st.integers(0, 3))
    def bring_back(self, number: int) -> None:
        self.gone.discard(f"GPU-{number}")

    @rule(seconds=st.sampled_from([2.0, 60.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule()
    def close(self) -> None:
        self.snapshot = reduce(self.snapshot, Unavailable("closed"))
        self.open = False

    @rule(number=st.integers(0, 3))
    def clear(self, number: int) -> None:
        uuid = f"GPU-{number}"
        if not self.snapshot.by_uuid[uuid].health.away:
            self.snapshot = reduce(self.snapshot, Cleared(uuid, self.now))
            self.deadly.discard(uuid)

    @invariant()
    def nobody_disappears(self) -> None:
        assert sorted(state.uuid for state in self.snapshot.gpus) == [one.uuid for one in GPUS]
        assert self.snapshot.by_uuid == {state.uuid: state for state in self.snapshot.gpus}
        assert self.open or not any(state.healthy for state in self.snapshot.gpus)

    def teardown(self) -> None:
        """In the calm after the storm, verdicts are what the machine is."""
        for _ in range(4):
            self.now += 400
            self.look()
        for state in self.snapshot.gpus:
            if state.uuid in self.gone or state.uuid in self.deadly:
                assert state.health.state is HealthState.UNHEALTHY
            else:
                assert state.health is HEALTHY, state


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
