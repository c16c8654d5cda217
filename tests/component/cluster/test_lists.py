"""Lists that begin a copy: streamed, plain, in pages, incomplete."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

from agent.cluster.reflector import DeltaReflector
from agent.model.pod import Metadata, Pod
from tests.component.cluster.following import INITIAL, PODS, A, B, following, names, warnings
from tests.component.cluster.server import (
    FakeApi,
    bookmark,
    client,
    error,
    event,
    opened,
    page,
    pod,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually


async def test_a_streaming_list_is_shown_only_when_complete(logs: Any) -> None:
    gate = anyio.Event()

    async def slow(request: Any) -> Any:
        response = await opened(request)
        await response.write(
            json.dumps(INITIAL[0]).encode() + b"\n" + json.dumps(bookmark("3")).encode() + b"\n"
        )
        await gate.wait()
        for one in INITIAL[1:]:
            await response.write(json.dumps(one).encode() + b"\n")
        await anyio.sleep_forever()

    async with following(slow) as (fake, reflector):
        await eventually(lambda: len(fake.asked) == 1)
        await anyio.sleep(0.05)
        assert (names(reflector), reflector.synced) == (set(), False)
        gate.set()
        await eventually(lambda: reflector.synced)
        assert names(reflector) == {"a", "b"}
        assert reflector.items.version == 1
        assert reflector.problem is None
        query = dict(fake.asked[0].query)
        assert 210 <= int(query.pop("timeoutSeconds")) <= 300
        assert query == {
            "fieldSelector": "spec.nodeName=n",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
        }
    assert warnings(logs) == []


async def test_an_incomplete_list_is_begun_anew(logs: Any) -> None:
    """A bookmark in the middle of it is no place to go on from."""
    async with following(watch(event("ADDED", A), bookmark("5"), then="end"), watch(*INITIAL[1:])) as (
        fake,
        reflector,
    ):
        await eventually(lambda: reflector.synced)
        assert fake.asked[1].version is None
        assert names(reflector) == {"b"}
    assert "before it was complete" in warnings(logs)[0]


@pytest.mark.parametrize("code", [400, 422])
async def test_a_server_without_streaming_lists_is_listed_plainly(code: int, logs: Any) -> None:
    refusal = status(
        code, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
    )
    async with following(refusal, page("7", A, B), watch(event("DELETED", A | pod("a", "8")))) as (
        fake,
        reflector,
    ):
        await eventually(lambda: names(reflector) == {"b"})
        plain, followed = fake.asked[1:3]
        assert plain.query == {"fieldSelector": "spec.nodeName=n", "resourceVersion": "0"}
        assert followed.version == "7"
        assert reflector.synced
    assert warnings(logs) == []


async def test_a_list_after_a_watch_is_not_older_than_what_was_seen() -> None:
    async with following(
        status(400, "sendInitialEvents is forbidden"),
        page("7", A),
        watch(event("ADDED", pod("b", "9")), error(410, "too old"), then="end"),
        status(504, "Too large resource version: 9, current: 8"),
        page("8", A),
        watch(),
    ) as (fake, reflector):
        await eventually(lambda: len(fake.asked) == 6)
        assert [each.version for each in fake.asked] == [None, "0", "7", "9", "0", "8"]
        await eventually(lambda: names(reflector) == {"a"})


async def test_a_list_for_a_ledger_never_comes_from_the_servers_cache() -> None:
    class Listener:
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def replaced(self, values: Mapping[str, str]) -> None:
            self.seen = set(values.values())

        def changed(self, uid: str, value: str) -> None:
            raise AssertionError

        removed = changed

    def read(raw: bytes) -> tuple[Metadata, str]:
        found = msgspec.json.decode(raw, type=Pod)
        return found.metadata, found.metadata.name

    fake, listener = FakeApi(), Listener()
    fake.script(PODS, status(400), page("7", A, B), watch())
    async with fake.serving(), client(fake.url) as api, anyio.create_task_group() as group:
        reflector = DeltaReflector(api, PODS, {}, read, listener, "pods")
        group.start_soon(reflector.run)
        await eventually(lambda: listener.seen == {"a", "b"})
        assert fake.asked[1].query == {"limit": "500"}
        group.cancel_scope.cancel()


async def test_a_large_list_is_read_page_by_page_and_shown_whole() -> None:
    class Listener:
        shown: ClassVar[list[set[str]]] = []

        def replaced(self, values: Mapping[str, str]) -> None:
            self.shown.append(set(values))

        def changed(self, uid: str, value: str) -> None:
            raise AssertionError("nothing changes")

        removed = changed

    def read(raw: bytes) -> tuple[Metadata, str]:
        found = msgspec.json.decode(raw, type=Pod)
        return found.metadata, found.metadata.name

    fake, listener = FakeApi(), Listener()
    pages = (
        page("7", A, next_page="second"),
        status(410, "too late"),
        page("8", A, next_page="second"),
        page("8", B),
    )
    fake.script(PODS, status(400), *pages, watch())
    async with fake.serving(), client(fake.url) as api, anyio.create_task_group() as group:
        reflector = DeltaReflector(api, PODS, {"fieldSelector": "x"}, read, listener, "pods")
        group.start_soon(reflector.run)
        await eventually(lambda: reflector.synced)
        # The rest of the first list had expired: it is begun again, and nothing of it was shown.
        assert listener.shown == [{"a", "b"}]
        asked = [dict(one.query) for one in fake.asked[1:5]]
        first = {"fieldSelector": "x", "limit": "500"}
        assert asked == [first, first | {"continue": "second"}] * 2
        assert fake.asked[5].version == "8"
        group.cancel_scope.cancel()


async def test_a_plain_list_that_fails_is_tried_again() -> None:
    async with following(status(400), status(500, "etcd is away"), page("7", A), watch()) as (_, reflector):
        await eventually(lambda: reflector.synced)
        assert names(reflector) == {"a"}
