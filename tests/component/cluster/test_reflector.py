"""The local copy of API objects against a server with every bad habit."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

from agent.cluster import api as api_module
from agent.cluster import reflector as reflector_module
from agent.cluster.deltas import DeltaReflector
from agent.cluster.pods import Pod
from agent.cluster.reflector import Metadata, Reflector
from tests.component.cluster.server import (
    Answer,
    FakeApi,
    bookmark,
    client,
    error,
    event,
    opened,
    page,
    pod,
    send,
    silence,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually

PODS = "/api/v1/pods"
A, B = pod("a"), pod("b", "2")


@asynccontextmanager
async def following(*answers: Answer) -> AsyncIterator[tuple[FakeApi, Reflector[Pod]]]:
    """A reflector that runs against a server with this script."""
    fake = FakeApi()
    fake.script(PODS, *answers)
    async with fake.serving(), client(fake.url) as api, anyio.create_task_group() as group:
        reflector = Reflector(api, PODS, {"fieldSelector": "spec.nodeName=n"}, Pod, "pods")
        group.start_soon(reflector.run)
        yield fake, reflector
        group.cancel_scope.cancel()


def names(reflector: Reflector[Pod]) -> set[str]:
    return {one.metadata.name for one in reflector.items.value.values()}


def warnings(logs: Any) -> list[str]:
    return [one["problem"] for one in logs if one["event"] == "watch_interrupted"]


INITIAL = (event("ADDED", A), event("ADDED", B), bookmark("10", complete=True))


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


async def test_changes_follow_and_deletions_too() -> None:
    changed = pod("a", "11", status={"phase": "Running"})
    script = watch(*INITIAL, event("MODIFIED", changed), event("DELETED", B), event("ADDED", pod("c", "13")))
    async with following(script) as (_, reflector):
        await eventually(lambda: names(reflector) == {"a", "c"})
        assert reflector.items.value["a"].status.phase == "Running"


async def test_a_watch_that_ends_goes_on_from_the_last_version_seen() -> None:
    async with following(
        watch(*INITIAL, event("ADDED", pod("c", "12")), then="end"),
        watch(event("ADDED", pod("d", "14")), bookmark("20"), then="end"),
        watch(then="hang"),
    ) as (fake, reflector):
        await eventually(lambda: len(fake.asked) == 3)
        assert [one.version for one in fake.asked] == [None, "12", "20"]
        assert "sendInitialEvents" not in fake.asked[1].query
        assert names(reflector) == {"a", "b", "c", "d"}


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


@pytest.mark.parametrize("code", [410, 504])
@pytest.mark.parametrize("where", ["stream", "status"])
async def test_a_version_that_is_gone_means_a_new_list(code: int, where: str, logs: Any) -> None:
    told = "Too large resource version" if code == 504 else "Expired"
    gone = watch(error(code, told), then="end") if where == "stream" else status(code, told)
    async with following(
        watch(*INITIAL, then="end"), gone, watch(event("ADDED", B), bookmark("30", complete=True))
    ) as (fake, reflector):
        await eventually(lambda: names(reflector) == {"b"})  # a was deleted while nobody watched
        assert [one.version for one in fake.asked[:3]] == [None, "10", None]
    assert warnings(logs) == []


async def test_a_server_that_never_has_the_version_is_not_hammered(logs: Any) -> None:
    async with following(watch(error(504, "Too large resource version: 9, current: 8"), then="end")) as (
        fake,
        reflector,
    ):
        await anyio.sleep(1.0)
        assert 2 <= len(fake.asked) <= 8
        assert reflector.problem is not None
        assert "Too large resource version" in reflector.problem
    assert len(warnings(logs)) == 1


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered() -> None:
    async with following(watch(*INITIAL, then="end"), watch(then="end")) as (fake, reflector):
        await anyio.sleep(1.0)
        assert 2 <= len(fake.asked) <= 8
        assert reflector.problem is None


async def test_retry_after_is_honoured_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = anyio.sleep

    async def remember(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.001)

    monkeypatch.setattr(anyio, "sleep", remember)
    monkeypatch.setattr(reflector_module, "LONGEST_RETRY_AFTER_SECONDS", 60.0)
    async with following(
        status(429, "slow down", Retry_After="7"),
        status(429, "slow down", Retry_After="86400"),
        status(429, "slow down", Retry_After="soon"),
        watch(*INITIAL),
    ) as (_, reflector):
        with anyio.fail_after(10):
            await reflector.items.wait_change(0)
    assert pauses[:2] == [7.0, 60.0]
    assert pauses[2] < 2


async def test_a_missing_right_is_named(logs: Any) -> None:
    refusal = 'pods is forbidden: User "system:serviceaccount:gpu:agent" cannot watch resource "pods"'
    async with following(status(403, refusal), status(403, refusal), watch(*INITIAL)) as (_, reflector):
        await eventually(lambda: reflector.problem is not None and "403" in reflector.problem)
        problem = str(reflector.problem)
        await eventually(lambda: reflector.synced)
    assert f"GET /api/v1/pods: 403 {refusal}" in problem
    assert "grant the right to the agent's service account" in problem
    assert warnings(logs) == [problem]  # told once, not at every try
    assert [one["event"] for one in logs] == ["watch_interrupted", "watch_established"]


async def test_a_silent_watch_is_opened_anew(monkeypatch: pytest.MonkeyPatch, logs: Any) -> None:
    assert reflector_module.SILENCE_SECONDS == 90.0
    monkeypatch.setattr(reflector_module, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(reflector_module, "STEADY_SECONDS", 0.1)

    async def padded(request: Any) -> Any:
        """Something comes, but no event: a proxy that has lost the server behind it."""
        response = await opened(request)
        while True:
            await response.write(b"\n")
            await anyio.sleep(0.02)

    after = watch(event("ADDED", pod("c", "11")))
    async with following(watch(*INITIAL), padded, after, watch()) as (fake, reflector):
        await eventually(lambda: names(reflector) == {"a", "b", "c"})
        assert [one.version for one in fake.asked] == [None, "10", "10"]
        await eventually(lambda: len(fake.asked) >= 5)
        # What was held is held on: the server has refused nothing, and it is not away.
        assert (reflector.problem, reflector.away) == (None, False)
    assert [one["event"] for one in logs] == ["watch_established", "watch_silent", "watch_silent"]


async def test_events_and_bookmarks_keep_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector_module, "SILENCE_SECONDS", 0.3)

    async def sparse(request: Any) -> Any:
        response = await opened(request)
        await send(response, *INITIAL)
        for number in range(8):
            await anyio.sleep(0.1)
            await send(response, bookmark(str(20 + number)))
        await send(response, event("ADDED", pod("c", "30")))
        await anyio.sleep_forever()

    async with following(sparse) as (fake, reflector):
        await eventually(lambda: names(reflector) == {"a", "b", "c"})
        assert len(fake.asked) == 1


async def test_a_server_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "HEADERS_SECONDS", 0.2)
    async with following(silence, watch(*INITIAL)) as (_, reflector):
        await eventually(lambda: reflector.synced)


async def test_a_line_cut_in_half_is_not_taken_for_an_event(logs: Any) -> None:
    half = json.dumps(event("DELETED", A)).encode()[:-20]
    async with following(
        watch(*INITIAL, half, then="cut"), watch(event("ADDED", pod("c", "11")), half, then="end"), watch()
    ) as (fake, reflector):
        await eventually(lambda: len(fake.asked) == 3)
        assert names(reflector) == {"a", "b", "c"}
        assert [one.version for one in fake.asked[1:]] == ["10", "11"]


async def test_a_line_of_two_megabytes_in_small_pieces() -> None:
    huge = pod("huge", "11", status={"phase": "Running", "allocatedResourcesStatus": "x" * 2_000_000})
    async with following(watch(*INITIAL, event("ADDED", huge), pieces=8192)) as (_, reflector):
        await eventually(lambda: "huge" in names(reflector))
        assert reflector.items.value["huge"].status.phase == "Running"


async def test_nonsense_in_the_stream_is_told_and_survived(logs: Any) -> None:
    async with following(
        watch(*INITIAL, b"this is no JSON\n"), watch(event("ADDED", pod("c", "11"))), watch()
    ) as (_, reflector):
        await eventually(lambda: names(reflector) == {"a", "b", "c"})
    assert "malformed" in warnings(logs)[0].lower()


async def test_the_server_is_away_and_comes_back(logs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stays; what was deleted meanwhile goes with the new list."""
    fake = FakeApi()
    fake.script(PODS, watch(*INITIAL))
    async with fake.serving():
        port = fake.port
    async with client(fake.url) as api, anyio.create_task_group() as group:
        reflector = Reflector(api, PODS, {}, Pod, "pods")
        group.start_soon(reflector.run)
        await eventually(lambda: "cannot be reached" in (reflector.problem or ""))
        async with fake.serving(port):
            await eventually(lambda: reflector.synced)
        await eventually(lambda: "cannot be reached" in (reflector.problem or ""))
        assert (names(reflector), reflector.synced) == ({"a", "b"}, True)
        fake.scripts[PODS] = [status(410, "too old"), watch(event("ADDED", B), bookmark("90", complete=True))]
        async with fake.serving(port):
            await eventually(lambda: names(reflector) == {"b"})
            assert reflector.problem is None
            group.cancel_scope.cancel()
    kinds = [one["event"] for one in logs]
    assert kinds == ["watch_interrupted", "watch_established"] * 2


async def test_pauses_begin_anew_after_a_watch_that_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector_module, "STEADY_SECONDS", 0.05)
    pauses: list[float] = []
    sleep = anyio.sleep

    async def remember(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.001)

    async def held(request: Any) -> Any:
        response = await opened(request)
        await sleep(0.1)
        request.transport.abort()
        return response

    broken = status(500, "away")
    monkeypatch.setattr(anyio, "sleep", remember)
    async with following(watch(*INITIAL, then="end"), *[broken] * 6, held, broken, silence) as (fake, _):
        with anyio.fail_after(10):
            while len(fake.asked) < 10:
                await sleep(0.005)
    assert max(pauses[:7]) > 3
    assert pauses[7] <= 0.2


async def test_cancellation_leaves_no_connection() -> None:
    for script in (watch(*INITIAL), silence, status(500)):
        async with following(script) as (fake, _):
            await eventually(lambda: bool(fake.asked))
