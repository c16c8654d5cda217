"""Which claims have devices: waits for those of before, and the kubelet's record."""

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic

import anyio
import pytest

from agent.dra import ledger as ledger_module
from agent.dra.ledger import RECORDED_SECONDS, ClaimCall, ClaimLedger
from agent.kit.tasks import Cell
from agent.model.holding import Holding, Source
from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.model.resource_claim import AskedDevice, ClaimedShare, HeldClaim, device_name
from agent.modes.desired import ClaimRequests
from tests.virtual_time import in_virtual_time

GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"


def claim(name: str, cores: int = 0, memory: int = 1, gpus: tuple[str, ...] = (GPU,)) -> HeldClaim:
    mode = SHARES if cores else WHOLE_GPUS
    devices = [
        AskedDevice(
            "gpu", "pool", device_name(gpu, mode), ClaimedShare(gpu, mode, cores, memory, name, f"s-{name}")
        )
        for gpu in gpus
    ]
    return HeldClaim(f"u-{name}", "ns", name, tuple(devices))


def ledger(keep: float = 0.0) -> tuple[ClaimLedger, Cell[Mapping[str, Mode]]]:
    requests = ClaimRequests()
    return ClaimLedger(requests, lambda _: (139, 48), keep), requests.wanted


async def taken(book: ClaimLedger, *claims: HeldClaim) -> None:
    for each in claims:
        call = book.begin(each.uid)
        with anyio.fail_after(1):
            assert await book.enter(call, each)
        assert book.answered(call, each)
        book.end(call)


async def asks(book: ClaimLedger, each: HeldClaim) -> ClaimCall:
    """A call for it that waits for nobody, and is under way."""
    call = book.begin(each.uid)
    with anyio.fail_after(1):
        assert await book.enter(call, each)
    return call


def over(book: ClaimLedger, each: HeldClaim) -> None:
    book.unprepared(each.uid, each.key)


async def test_the_first_claim_chooses_and_the_last_one_frees() -> None:
    book, wanted = ledger()
    one, other = claim("one", 30), claim("other", 70)
    await taken(book, one, other)
    assert wanted.value == {GPU: SHARES}
    over(book, one)
    assert wanted.value == {GPU: SHARES}
    over(book, other)
    over(book, other)
    assert wanted.value == {}


@pytest.mark.parametrize(
    ("there", "comes"),
    [
        (claim("a", 30), claim("b")),
        (claim("a"), claim("b", 30)),
        (claim("a"), claim("b")),
        (claim("a", 60), claim("b", 50)),
        (claim("a", 10, 100), claim("b", 10, 40)),
    ],
)
@in_virtual_time
async def test_a_claim_waits_for_those_that_were_freed_while_their_containers_run(
    there: HeldClaim, comes: HeldClaim
) -> None:
    book, wanted = ledger()
    await taken(book, there)
    before = dict(wanted.value)
    with anyio.move_on_after(0.05):
        await asks(book, comes)
        raise AssertionError("it did not wait")
    assert there.name in book.obstacle(comes)
    assert wanted.value == before
    async with anyio.create_task_group() as group:
        group.start_soon(taken, book, comes)
        await anyio.sleep(0.01)
        over(book, there)
    assert set(book.held.value) == {comes.uid}


@in_virtual_time
async def test_of_two_that_wait_one_gets_it_and_the_other_waits_on() -> None:
    book, _ = ledger()
    first, *others = claim("a"), claim("b"), claim("c")
    await taken(book, first)
    got: list[str] = []

    async def enter(each: HeldClaim) -> None:
        await book.enter(book.begin(each.uid), each)
        got.append(each.name)

    async with anyio.create_task_group() as group:
        for each in others:
            group.start_soon(enter, each)
        await anyio.sleep(0.01)
        over(book, first)
        await anyio.sleep(0.01)
        assert len(got) == 1
        over(book, next(each for each in others if each.name == got[0]))
    assert len(got) == 2


@in_virtual_time
async def test_a_claim_of_several_gpus_takes_all_or_none() -> None:
    book, wanted = ledger()
    await taken(book, claim("a", gpus=("GPU-2",)))
    with anyio.move_on_after(0.05):
        await asks(book, claim("b", gpus=("GPU-1", "GPU-2")))
    assert wanted.value == {"GPU-2": WHOLE_GPUS}


async def test_a_failed_prepare_leaves_nothing_and_takes_nothing_of_one_that_succeeded() -> None:
    book, wanted = ledger()
    one = claim("one", 30)
    book.end(await asks(book, one))
    assert wanted.value == {}
    await taken(book, one)
    book.end(await asks(book, one))  # the kubelet restarted
    assert wanted.value == {GPU: SHARES}


async def test_two_calls_for_one_claim_are_one() -> None:
    book, wanted = ledger()
    one = claim("one", 30)
    first, second = await asks(book, one), await asks(book, one)
    book.end(first)
    book.end(first)
    assert wanted.value == {GPU: SHARES}
    assert book.answered(second, one)


async def test_a_claim_goes_with_the_last_of_its_calls_where_none_was_answered() -> None:
    """The last one may fail before it enters: the claim cannot be read any more."""
    book, wanted = ledger()
    one = claim("one", 30)
    first, second = await asks(book, one), book.begin(one.uid)
    book.end(first)
    assert wanted.value == {GPU: SHARES}
    book.end(second)
    assert wanted.value == {}
    assert not book.unanswered


async def test_a_claim_that_is_given_back_while_it_is_prepared_is_not_answered() -> None:
    book, _ = ledger()
    one = claim("one", 30)
    call = await asks(book, one)
    over(book, one)
    assert not book.answered(call, one)
    book.end(call)


@in_virtual_time
async def test_a_claim_that_is_given_back_while_it_waits_for_others_gets_nothing() -> None:
    """The kubelet ends its call and gives the claim back; the others' end may wake the call before."""
    book, wanted = ledger()
    there, comes = claim("there"), claim("comes", 30)
    await taken(book, there)
    call = book.begin(comes.uid)
    entered: list[bool] = []

    async def enter() -> None:
        entered.append(await book.enter(call, comes))

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.sleep(0.01)
        over(book, comes)
        over(book, there)
    assert entered == [False]
    assert not book.answered(call, comes)
    book.end(call)
    assert not book.held.value
    assert wanted.value == {}


@in_virtual_time
async def test_a_call_of_before_takes_nothing_of_the_one_for_the_claims_next_pod() -> None:
    book, wanted = ledger()
    one = claim("one", 30)
    before = await asks(book, one)
    over(book, one)
    now = await asks(book, one)
    assert not book.answered(before, one)
    book.end(before)
    assert wanted.value == {GPU: SHARES}
    assert book.unanswered == {one.uid}
    assert book.answered(now, one)
    book.end(now)
    assert wanted.value == {GPU: SHARES}


@in_virtual_time
async def test_a_daemon_is_kept_warm_unless_a_whole_gpu_is_asked_for() -> None:
    book, wanted = ledger(keep=0.05)
    one = claim("one", 30)
    await taken(book, one)
    over(book, one)
    assert wanted.value == {GPU: SHARES}
    pause = book.cool()
    assert pause
    await anyio.sleep(pause + 0.01)
    assert book.cool() is None
    assert wanted.value == {}
    await taken(book, one)
    over(book, one)
    await taken(book, claim("whole"))
    assert wanted.value == {GPU: WHOLE_GPUS}


async def test_the_kubelets_record_counts_beside_what_was_answered_since() -> None:
    book, wanted = ledger()
    old, new = claim("old", 30), claim("new", 20)
    book.read({old.uid: old}, monotonic())
    await taken(book, new)
    book.read({old.uid: old}, monotonic())
    assert set(book.held.value) == {old.uid, new.uid}
    # Long after: the kubelet has never taken the new one in.
    book.read({old.uid: old}, monotonic() + 2 * RECORDED_SECONDS)
    assert set(book.held.value) == {old.uid}
    began = monotonic()
    over(book, old)
    book.read({old.uid: old}, began)  # a reading of before
    assert wanted.value == {}


async def test_answers_are_forgotten_where_the_record_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    book, _ = ledger()
    began = monotonic()
    monkeypatch.setattr(ledger_module, "monotonic", lambda: began)
    for number in range(5000):
        one = claim(f"c{number}", 30)
        await taken(book, one)
        over(book, one)
    monkeypatch.setattr(ledger_module, "monotonic", lambda: began + RECORDED_SECONDS)
    book.cool()
    book.read({one.uid: one}, began)  # a reading of before
    assert not book.held.value
    assert len(book._answered) == 5000
    monkeypatch.setattr(ledger_module, "monotonic", lambda: began + 61)
    book.cool()
    assert not book._answered


async def test_without_a_record_holders_by_pod_resources_count() -> None:
    book, wanted = ledger()
    one = claim("one", 30)
    share = one.devices[0].share
    book.adopt([Holding("ns", "p", c, "x", (), Source.CLAIM, share) for c in ("main", "other")])
    assert wanted.value == {GPU: SHARES}
    assert book.obstacle(claim("whole"))
    await taken(book, one)  # the kubelet restarts, and prepares again
    assert set(book.held.value) == {one.uid}
    over(book, one)
    assert wanted.value == {}


async def test_one_that_was_adopted_is_freed_by_its_name() -> None:
    book, wanted = ledger()
    one = claim("one", 30)
    book.adopt([Holding("ns", "p", "main", "x", (), Source.CLAIM, one.devices[0].share)])
    over(book, one)
    assert wanted.value == {}


async def test_a_claim_keeps_its_devices_while_other_drivers_of_its_pod_prepare() -> None:
    """They may take longer than a record that lacks a claim is waited for; an unprepared one stays away."""
    book, wanted = ledger()
    one = claim("one", 30)
    pending = replace(one, devices=())
    await taken(book, one)
    for seconds in (RECORDED_SECONDS + 1, 45, 300):
        book.read({one.uid: pending}, monotonic() + seconds)
        assert book.held.value == {one.uid: one}
        assert wanted.value == {GPU: SHARES}
    over(book, one)
    book.read({one.uid: pending}, monotonic() + 301)
    assert not book.held.value
    await taken(book, one)
    book.read({}, monotonic() + RECORDED_SECONDS + 1)
    assert not wanted.value


@in_virtual_time
async def test_of_128_shares_of_a_gpu_as_many_are_ready_as_mps_serves() -> None:
    """The scheduler counts clients, too; this is for one that counted by an older slice."""
    book, _ = ledger()
    shares = [claim(f"share-{number}", cores=1) for number in range(128)]
    await taken(book, *shares[:48])
    assert "still in use by" in book.obstacle(shares[48])
    with anyio.move_on_after(0.05) as waited:
        await asks(book, shares[48])
    assert waited.cancelled_caught
    over(book, shares[0])
    await taken(book, shares[48])


@in_virtual_time
async def test_adopted_claim_outlives_a_call_that_failed() -> None:
    book, wanted = ledger()
    one = claim("one", 60)
    holding = Holding("ns", "pod", "main", "claim", (), Source.CLAIM, one.devices[0].share)
    book.adopt([holding])  # the claims' checkpoint cannot be read; a pod runs
    assert wanted.value
    call = await asks(book, one)  # the kubelet restarts, and prepares again what runs
    book.end(call)  # the GPU was unhealthy for 40 s, or the kubelet hung up
    assert wanted.value, "its GPU is nobody's, though the container runs"
    assert book.obstacle(claim("two", 60)), "and its units are sold again"
