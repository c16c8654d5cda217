"""The mailbox: order, bounds, drops, cancellation."""

import anyio
from hypothesis import given
from hypothesis import strategies as st

from agent.kit.tasks import Mailbox


async def read(mailbox: Mailbox[int], count: int) -> list[int]:
    got: list[int] = []
    with anyio.fail_after(30):
        async for message in mailbox:
            got.append(message)
            if len(got) == count:
                break
    return got


async def test_messages_arrive_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox(10)
    for number in range(5):
        await mailbox.post(number)
    assert mailbox.depth == 5
    assert await read(mailbox, 5) == [0, 1, 2, 3, 4]
    assert mailbox.depth == 0


async def test_a_reader_that_waits_is_woken() -> None:
    mailbox: Mailbox[int] = Mailbox(1)
    got: list[int] = []

    async def actor() -> None:
        got.extend(await read(mailbox, 3))

    async with anyio.create_task_group() as group:
        group.start_soon(actor)
        for number in range(3):
            await anyio.wait_all_tasks_blocked()
            await mailbox.post(number)
    assert got == [0, 1, 2]


async def test_post_waits_for_room_in_order_of_arrival() -> None:
    mailbox: Mailbox[int] = Mailbox(2)
    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(mailbox.post, number)
            await anyio.wait_all_tasks_blocked()
        assert mailbox.depth == 2
        assert await read(mailbox, 6) == [0, 1, 2, 3, 4, 5]


async def test_offer_drops_when_full_and_counts() -> None:
    mailbox: Mailbox[int] = Mailbox(2)
    assert [mailbox.offer(number) for number in range(4)] == [True, True, False, False]
    assert (mailbox.dropped, mailbox.depth) == (2, 2)
    assert await read(mailbox, 2) == [0, 1]
    assert mailbox.offer(9)


async def test_a_cancelled_post_leaves_no_message_and_no_hole() -> None:
    mailbox: Mailbox[int] = Mailbox(1)
    await mailbox.post(1)
    with anyio.move_on_after(0.01) as scope:
        await mailbox.post(2)
    assert scope.cancelled_caught
    assert await read(mailbox, 1) == [1]
    assert mailbox.depth == 0
    assert mailbox.offer(3)
    assert not mailbox.offer(4)


async def test_a_cancelled_reader_loses_no_message() -> None:
    mailbox: Mailbox[int] = Mailbox(4)
    with anyio.move_on_after(0.01):
        await read(mailbox, 1)
    await mailbox.post(1)
    assert await read(mailbox, 1) == [1]


@given(size=st.integers(1, 5), sends=st.lists(st.booleans(), max_size=40))
def test_what_is_not_dropped_arrives_once_and_in_order(size: int, sends: list[bool]) -> None:
    async def scenario() -> None:
        mailbox: Mailbox[int] = Mailbox(size)
        expected: list[int] = []
        for number, read_first in enumerate(sends):
            if read_first and mailbox.depth:
                assert await read(mailbox, 1) == [expected.pop(0)]
            if mailbox.offer(number):
                expected.append(number)
            assert mailbox.depth == len(expected) <= size
        assert await read(mailbox, len(expected)) == expected if expected else True

    anyio.run(scenario)
