"""The ledger: rooms after holdings and promises, and when promises end."""

import pytest

from agent.model.holding import (
    Holder,
    Holding,
    Ledger,
    PairHoldings,
    PairMember,
    Record,
    Reservation,
    UnitPool,
)
from agent.model.placement import FreeGpu
from agent.model.pod import VGPU, Demand
from tests.pods import a_pod

A, B = "GPU-a", "GPU-b"
ME, OTHER = Holder("d", "me", "main"), Holder("d", "other", "main")
MINE, THEIRS, NOBODY = a_pod("d", "me", ()), a_pod("d", "other", ()), Holder("d", "nobody", "main")


def pool(gpu: str, index: int) -> UnitPool:
    return UnitPool.of(VGPU, gpu, index, 40 << 28)


def held(holder: Holder, resource: str, ids: frozenset[str]) -> Holding:
    return Holding(*holder, resource, tuple(sorted(ids)))


def holdings(*found: Holding) -> PairHoldings:
    return PairHoldings.of(VGPU, Record(found))


def ledger(*found: Holding) -> Ledger:
    return Ledger({A: pool(A, 0), B: pool(B, 1)}, holdings(*found))


def cores(gpu: str, first: int, count: int) -> frozenset[str]:
    return frozenset(f"{gpu}::c{n}" for n in range(first, first + count))


def blocks(gpu: str, first: int, count: int) -> frozenset[str]:
    return frozenset(f"{gpu}::m{n}" for n in range(first, first + count))


def rooms(
    book: Ledger,
    asking: Holder = NOBODY,
    own: frozenset[str] = frozenset(),
    also: frozenset[str] = frozenset(),
) -> dict[str, FreeGpu]:
    """Rooms for a container, with what else is taken."""
    return book.free_gpus(asking, book.taken(asking, own) | also, own)


def test_a_stock_has_all_units_of_a_gpu() -> None:
    made = pool(A, 0)
    assert (made.cores[0], made.cores[-1], len(made.cores)) == (f"{A}::c0", f"{A}::c99", 100)
    assert (made.blocks[0], made.blocks[-1], len(made.blocks)) == (f"{A}::m0", f"{A}::m39", 40)


def test_rooms_are_what_is_neither_held_nor_promised() -> None:
    book = ledger(held(OTHER, VGPU.core, cores(A, 0, 30)), held(OTHER, VGPU.memory, blocks(A, 0, 5)))
    book = book.reserved(Reservation(ME, MINE, Demand(20, 10), (A,), expires=10.0))
    room = rooms(book)[A]
    assert (room.cores, room.blocks, room.untouched) == (50, 25, False)
    assert rooms(book, ME)[A].cores == 70
    assert rooms(book)[B].untouched


def test_answered_ids_count_once() -> None:
    promise = Reservation(ME, MINE, Demand(20, 10), (A,), 10.0).with_ids(PairMember.CORE, cores(A, 0, 20))
    book = ledger(held(ME, VGPU.core, cores(A, 0, 20))).reserved(promise)
    assert (rooms(book)[A].cores, rooms(book)[A].blocks) == (80, 30)


def test_a_gpu_that_is_held_or_promised_whole_has_no_room() -> None:
    book = ledger(held(OTHER, VGPU.core, cores(A, 0, 100)))
    assert book.whole == {A}
    assert (rooms(book)[A].cores, rooms(book)[A].blocks) == (0, 0)
    promised = ledger().reserved(Reservation(OTHER, THEIRS, Demand(100, 0, whole=1), (B,), 10.0))
    assert rooms(promised, ME)[B].blocks == 0
    assert rooms(promised, OTHER)[B].untouched


def test_all_cores_sold_in_shares_leave_memory_to_sell() -> None:
    book = ledger(held(OTHER, VGPU.core, cores(A, 0, 60)), held(ME, VGPU.core, cores(A, 60, 40)))
    assert book.whole == frozenset()
    assert rooms(book)[A].blocks == 40


def test_cores_that_containers_have_grown_by_make_no_gpu_whole() -> None:
    everything = held(OTHER, VGPU.core, cores(B, 0, 100))
    pools = {A: pool(A, 0).without(cores(A, 0, 100)), B: pool(B, 1)}
    book = Ledger(pools, holdings(everything))
    assert book.whole == {B}
    assert (rooms(book)[A].cores, rooms(book)[A].blocks) == (0, 40)
    # All that is left goes to one container, which asked for less than a GPU.
    book = Ledger({A: pool(A, 0).without(cores(A, 60, 40))})
    rest = Reservation(ME, MINE, Demand(60, 0), (A,), 10.0).with_ids(PairMember.CORE, cores(A, 0, 60))
    book = book.reserved(rest.with_grant(PairMember.CORE))
    assert book.whole == frozenset()
    assert (rooms(book)[A].cores, rooms(book)[A].blocks) == (0, 40)


def test_a_gpu_with_grown_cores_is_not_wholly_free() -> None:
    book = Ledger({A: pool(A, 0).without(cores(A, 99, 1)), B: pool(B, 1)})
    assert [gpu for gpu, room in rooms(book).items() if room.untouched] == [B]


def test_inherited_units_are_room_for_their_heir() -> None:
    book = ledger(held(ME, VGPU.core, cores(A, 0, 100)))
    assert rooms(book, ME, own=cores(A, 0, 100))[A].untouched
    assert rooms(book, ME, cores(A, 0, 100), also=blocks(A, 0, 40))[A].blocks == 0


def test_a_whole_gpu_reserved_for_an_init_container_is_room_for_its_heir_alone() -> None:
    init = Reservation(OTHER, MINE, Demand(100, 0, whole=1), (A,), 10.0)
    assert rooms(ledger().reserved(init), ME, own=cores(A, 0, 100))[A].cores == 0  # not answered yet
    book = ledger().reserved(init.with_ids(PairMember.CORE, cores(A, 0, 100)))
    assert rooms(book, ME, own=cores(A, 0, 100))[A].untouched
    for own in (frozenset[str](), cores(A, 0, 99), cores(B, 0, 100)):
        assert (rooms(book, ME, own=own)[A].cores, rooms(book, ME, own=own)[A].blocks) == (0, 0)


def test_promises_end_when_shown_late_or_over() -> None:
    mine = cores(A, 0, 20)
    kept = (
        Reservation(ME, MINE, Demand(20, 0), (A,), 10.0)
        .with_ids(PairMember.CORE, mine)
        .with_grant(PairMember.CORE)
    )
    opened = Reservation(OTHER, THEIRS, Demand(20, 10), (A,), 10.0).with_grant(PairMember.CORE)
    book = ledger().reserved(kept).reserved(opened)
    assert kept.complete
    assert not opened.complete
    # One that is not shown yet goes on: a record may be older than it, and init containers stand in it late.
    assert book.observed(PairHoldings(), lambda _: False) is book
    shown = holdings(held(ME, VGPU.core, mine))
    assert book.observed(shown, lambda _: False).reservations == (opened,)
    assert book.observed(PairHoldings(), lambda each: each.pod is THEIRS).reservations == (kept,)
    assert book.expired(10.0).reservations == ()
    assert book.expired(9.0) is book


def test_a_second_promise_replaces_the_first() -> None:
    book = ledger().reserved(Reservation(ME, MINE, Demand(5, 1), (A,), 1.0))
    book = book.reserved(Reservation(ME, MINE, Demand(6, 2), (B,), 2.0))
    assert [each.gpus for each in book.reservations] == [(B,)]
    assert book.without(lambda each: each.holder == ME).reservations == ()


@pytest.mark.parametrize("asking", [ME, OTHER, NOBODY])
@pytest.mark.parametrize("own", [frozenset(), cores(A, 0, 5), cores(A, 40, 5)])
def test_units_that_are_taken_are_found_with_and_without_going_through_all(
    asking: Holder, own: frozenset[str]
) -> None:
    book = ledger(held(OTHER, VGPU.core, cores(A, 0, 30)), held(OTHER, VGPU.memory, blocks(A, 0, 5)))
    promise = Reservation(ME, MINE, Demand(20, 10), (A,), 10.0).with_ids(PairMember.CORE, cores(A, 30, 20))
    book = book.reserved(promise)
    every = pool(A, 0).core_set | pool(A, 0).block_set
    assert book.taken_of(every, asking, own) == book.taken(asking, own)
    assert book.taken_of(cores(A, 28, 4), asking, own) == book.taken(asking, own) & cores(A, 28, 4)
    assert book.taken_of(cores(B, 0, 4), asking, own) == frozenset()
