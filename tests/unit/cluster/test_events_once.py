"""Events that are written once: how long that is remembered."""

import time
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agent.cluster import event_recorder
from agent.cluster.event_recorder import KEPT_SECONDS, Event, EventRecorder, Regarding


class Api:
    def __init__(self) -> None:
        self.posts = 0

    async def post(self, path: str, body: Any) -> bytes:
        del path, body
        self.posts += 1
        return b"{}"


async def test_an_event_is_forgotten_when_the_server_has_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    api, moment = Api(), 0.0
    clock = SimpleNamespace(monotonic=lambda: moment, time_ns=time.time_ns)
    monkeypatch.setattr(event_recorder, "time", clock)
    recorder = EventRecorder(api, "n")  # type: ignore[arg-type]

    async def write(uid: int) -> None:
        recorder.emit(Event(Regarding("Pod", "p", "ns", str(uid)), "WaitingForGPU", "x", key="full"))
        await anyio.wait_all_tasks_blocked()

    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        for number in range(50):
            moment = number
            await write(number)
        await write(0)
        assert (api.posts, len(recorder._once)) == (50, 50)
        moment = KEPT_SECONDS + 29
        await write(-1)
        assert (api.posts, len(recorder._once)) == (51, 21)
        await write(49)
        assert api.posts == 51
        await write(0)
        assert api.posts == 52
        group.cancel_scope.cancel()
