"""The ledger: rooms after holdings and promises, and when promises end."""

from agent.model.demand import VGPU, Demand
from agent.model.ledger import Half, Held, Holder, Holdings, Ledger, Reservation, Stock

A, B = "GPU-a", "GPU-b"
ME, OTHER = Holder("d", "me", "main"), Holder("d", "other", "main")
PODS = frozenset({("d", "me"), ("d", "other")})


def stock(gpu: str, index: int) -> Stock:
    return Stock.of(VGPU, gpu, index, 40 << 28)


def ledger(*held: Held) -> Ledger:
    return Ledger({A: stock(A, 0), B: stock(B, 1)}, Holdings(held))


def cores(gpu: str, first: int, count: int) -> frozenset[str]:
    return frozenset(f"{gpu}::c{n}" for n in range(first, first + count))


def blocks(gpu: str, first: int, count: int) -> frozenset[str]:
    return frozenset(f"{gpu}::m{n}" for n in range(first, first + count))


def test_a_stock_has_all_units_of_a_gpu() -> None:
    made = stock(A, 0)
    assert (made.cores[0], made.cores[-1], len(made.cores)) == (f"{A}::c0", f"{A}::c99", 100)
    assert (made.blocks[0], made.blocks[-1], len(made.blocks)) == (f"{A}::m0", f"{A}::m39", 40)


def test_rooms_are_what_is_neither_held_nor_promised() -> None:
    book = ledger(Held(OTHER, Half.CORE, cores(A, 0, 30)), Held(OTHER, Half.MEMORY, blocks(A, 0, 5)))
    book = book.promised(Reservation(ME, Demand(20, 10), (A,), expires=10.0))
    room = book.rooms()[A]
    assert (room.cores, room.blocks, room.untouched) == (50, 25, False)
    assert book.rooms(ME)[A].cores == 70
    assert book.rooms()[B].untouched


def test_answered_ids_count_once() -> None:
    promise = Reservation(ME, Demand(20, 10), (A,), 10.0).with_ids(Half.CORE, cores(A, 0, 20))
    book = ledger(Held(ME, Half.CORE, cores(A, 0, 20))).promised(promise)
    assert (book.rooms()[A].cores, book.rooms()[A].blocks) == (80, 30)


def test_a_gpu_that_is_held_or_promised_whole_has_no_room() -> None:
    book = ledger(Held(OTHER, Half.CORE, cores(A, 0, 100)))
    assert book.whole == {A}
    assert (book.rooms()[A].cores, book.rooms()[A].blocks) == (0, 0)
    promised = ledger().promised(Reservation(OTHER, Demand(100, 0, whole=1), (B,), 10.0))
    assert promised.rooms(ME)[B].blocks == 0
    assert promised.rooms(OTHER)[B].untouched


def test_all_cores_sold_in_shares_leave_memory_to_sell() -> None:
    book = ledger(Held(OTHER, Half.CORE, cores(A, 0, 60)), Held(ME, Half.CORE, cores(A, 60, 40)))
    assert book.whole == frozenset()
    assert book.rooms()[A].blocks == 40


def test_inherited_units_are_room_for_their_heir() -> None:
    book = ledger(Held(ME, Half.CORE, cores(A, 0, 100)))
    assert book.rooms(ME, own=cores(A, 0, 100))[A].untouched
    assert book.rooms(ME, busy=blocks(A, 0, 40))[A].blocks == 0


def test_promises_end_when_kept_late_or_orphaned() -> None:
    kept = Reservation(ME, Demand(20, 0), (A,), 10.0).with_grant(Half.CORE)
    opened = Reservation(OTHER, Demand(20, 10), (A,), 10.0).with_grant(Half.CORE)
    book = ledger().promised(kept).promised(opened)
    assert kept.complete
    assert not opened.complete
    assert book.observed(Holdings(), PODS, now=5.0).reservations == (opened,)
    assert book.observed(Holdings(), PODS, now=11.0).reservations == ()
    assert book.observed(Holdings(), frozenset({("d", "me")}), now=5.0).reservations == ()
    assert book.expired(10.0).reservations == ()
    assert book.expired(9.0) is book


def test_a_promise_to_a_nameless_container_lives_until_it_is_late() -> None:
    nameless = Reservation(Holder("", "unknown", "core 1"), Demand(5, 0), (A,), 10.0, demand_known=False)
    book = ledger().promised(nameless.with_grant(Half.CORE))
    assert book.observed(Holdings(), PODS, now=5.0).reservations
    assert not book.observed(Holdings(), PODS, now=10.0).reservations


def test_a_second_promise_replaces_the_first() -> None:
    book = ledger().promised(Reservation(ME, Demand(5, 1), (A,), 1.0))
    book = book.promised(Reservation(ME, Demand(6, 2), (B,), 2.0))
    assert [each.gpus for each in book.reservations] == [(B,)]
    assert book.withdrawn(ME).reservations == ()
