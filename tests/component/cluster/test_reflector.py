"""The local copy of API objects against a server with every bad habit."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from agent.cluster import api as api_module
from agent.cluster import reflector as reflector_module
from agent.cluster.reflector import Reflector
from agent.model.pod import Pod
from tests.cluster.rig import free_ports
from tests.component.cluster.following import INITIAL, PODS, A, B, following, names, warnings
from tests.component.cluster.server import (
    FakeApi,
    bookmark,
    client,
    error,
    event,
    opened,
    pod,
    send,
    silence,
    status,
    watch,
)
from tests.component.kubelet_room.parts import eventually
from tests.pace import scaled


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the agent makes, in seconds; none takes its time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(reflector_module, "anyio", Pausing(pause))
    return made


class Pausing:
    """anyio with another sleep, for one module."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)


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


async def test_after_a_version_that_is_gone_the_copy_is_not_current_until_a_list_has_come(logs: Any) -> None:
    """Storm 63: for as long as that took, pods of before counted as there, and new ones as gone."""
    asked, answer = anyio.Event(), anyio.Event()

    async def slow(request: Any) -> Any:
        asked.set()
        await answer.wait()
        return await watch(event("ADDED", B), bookmark("30", complete=True))(request)

    async with following(watch(*INITIAL, then="end"), watch(error(410, "Expired"), then="end"), slow) as (
        _,
        reflector,
    ):
        await asked.wait()
        assert (names(reflector), reflector.problem is None) == ({"a", "b"}, False)
        answer.set()
        await eventually(lambda: names(reflector) == {"b"})
        assert reflector.problem is None
    assert warnings(logs) == []


async def test_a_server_that_never_has_the_version_is_not_hammered(logs: Any, pauses: list[float]) -> None:
    async with following(watch(error(504, "Too large resource version: 9, current: 8"), then="end")) as (
        fake,
        reflector,
    ):
        await eventually(lambda: len(pauses) >= 5)
        assert sum(pauses[:5]) > 1
        assert len(fake.asked) <= len(pauses) + 1
        assert reflector.problem is not None
        assert "Too large resource version" in reflector.problem
    assert len(warnings(logs)) == 1


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered(pauses: list[float]) -> None:
    async with following(watch(*INITIAL, then="end"), watch(then="end")) as (fake, reflector):
        await eventually(lambda: len(pauses) >= 5)
        assert sum(pauses[:5]) > 1
        assert len(fake.asked) <= len(pauses) + 1
        assert reflector.problem is None


async def test_retry_after_is_honoured_within_reason(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
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
    assert warnings(logs) == [problem]  # logged once, not at every try
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
        assert [one.version for one in fake.asked[:3]] == [None, "10", "10"]
        await eventually(lambda: len(fake.asked) >= 5)
        # What was held is held on: the server has refused nothing, and it is not away.
        assert reflector.problem is None
    assert [one["event"] for one in logs] == ["watch_established", "watch_silent", "watch_silent"]


async def test_events_and_bookmarks_keep_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = min(scaled(0.6), 3.0)
    monkeypatch.setattr(reflector_module, "SILENCE_SECONDS", silence)

    async def sparse(request: Any) -> Any:
        response = await opened(request)
        await send(response, *INITIAL)
        for number in range(4):
            await anyio.sleep(silence / 3)
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
    (port,) = free_ports(1)
    async with fake.serving(port):
        pass
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


async def test_pauses_begin_anew_after_a_watch_that_held(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    now = 0.0
    monkeypatch.setattr(
        anyio, "current_time", lambda: now
    )  # an answer takes no time, however busy the machine

    async def held(request: Any) -> Any:
        nonlocal now
        response = await opened(request)
        now += reflector_module.STEADY_SECONDS
        request.transport.abort()
        return response

    broken = status(500, "away")
    async with following(watch(*INITIAL, then="end"), *[broken] * 6, held, broken, silence) as (fake, _):
        await eventually(lambda: len(fake.asked) >= 10)
    assert max(pauses[:7]) > 3
    assert pauses[7] <= 0.2


async def test_cancellation_leaves_no_connection() -> None:
    for script in (watch(*INITIAL), silence, status(500)):
        async with following(script) as (fake, _):
            await eventually(lambda: bool(fake.asked))
