"""Events: counted, aged, logged when they find no room, and bounded in memory."""

import time
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.cluster.api import ApiUnavailable
from agent.cluster.event_recorder import (
    IN_A_ROW,
    MOST_SENDERS,
    SPARE_SECONDS,
    TRIES,
    WAITING,
    WAITING_OF_PODS,
    Event,
    EventRecorder,
    Regarding,
)
from tests.component.cluster.scripted import serving
from tests.component.cluster.server import objects, status
from tests.component.kubelet_room.parts import eventually

EVENTS = "/api/v1/namespaces/default/events"


async def test_equal_events_are_counted_and_aged_ones_made_anew() -> None:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        group.start_soon(recorder.run)
        recorder.node("GPULost", "GPU x is lost", warning=True)
        await eventually(lambda: len(fake.of(EVENTS)) == 1)
        body = fake.asked[0].body
        name = body["metadata"]["name"]
        assert body["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "n"}
        assert (body["reason"], body["message"], body["type"]) == ("GPULost", "GPU x is lost", "Warning")
        assert (body["count"], body["source"]) == (1, {"component": "gpu-node-agent", "host": "n"})
        assert body["firstTimestamp"].endswith("Z")

        one = f"{EVENTS}/{name}"
        fake.script(one, objects({}), objects({}), status(404, "gone"))
        for count in (2, 3):
            recorder.node("GPULost", "GPU x is lost", warning=True)
            await eventually(lambda: len(fake.of(one)) == count - 1)  # noqa: B023
            patched = fake.asked[-1]
            assert (patched.method, patched.body["count"]) == ("PATCH", count)
        recorder.node("GPULost", "GPU x is lost", warning=True)
        await eventually(lambda: len(fake.of(EVENTS)) == 2)
        again = fake.asked[-1].body
        assert again["count"] == 1
        assert again["metadata"]["name"] != name
        recorder.emit(Event(Regarding("Pod", "p", "ns", "uid"), "AllocationRefused", "x" * 5000))
        await eventually(lambda: len(fake.of("/api/v1/namespaces/ns/events")) == 1)
        other = fake.asked[-1].body
        assert other["involvedObject"] == {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": "p",
            "namespace": "ns",
            "uid": "uid",
        }
        assert (other["type"], len(other["message"])) == ("Normal", 1024)
        group.cancel_scope.cancel()


async def test_events_that_find_no_room_or_no_server_are_told(logs: Any) -> None:
    async with serving() as (fake, api):
        fake.script(EVENTS, status(403, "events is forbidden"))
        recorder = EventRecorder(api, "n")
        for number in range(WAITING + 10):
            recorder.node("GPULost", f"GPU {number} is lost")
        assert recorder.dropped == 10
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            await eventually(lambda: len(fake.of(EVENTS)) == WAITING)
            await eventually(lambda: len(logs) == WAITING)
            group.cancel_scope.cancel()
    assert {one["event"] for one in logs} == {"event_not_sent"}
    assert "events is forbidden" in logs[0]["problem"]


async def test_an_event_that_is_not_answered_is_sent_again_and_written_once(
    logs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.cluster.event_recorder.FIRST_PAUSE_SECONDS", 0.01)
    async with serving() as (fake, api):
        # The first try is lost on its way, the answer to the second on its way back.
        fake.script(EVENTS, objects({}), status(409, "already exists"), status(403, "events is forbidden"))
        lost, post = [True, False], api.post

        async def silent(path: str, body: object, deadline: float = 5.0) -> bytes:
            if lost:
                if not lost.pop(0):
                    await post(path, body, deadline)
                raise ApiUnavailable("POST: no answer")
            answer: bytes = await post(path, body, deadline)
            return answer

        monkeypatch.setattr(api, "post", silent)
        recorder = EventRecorder(api, "n")
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            recorder.node("GPULost", "GPU x is lost", warning=True)
            await eventually(lambda: len(fake.of(EVENTS)) == 2)
            assert len({each.body["metadata"]["name"] for each in fake.asked}) == 1
            recorder.node("GPULost", "GPU y is lost", warning=True)  # refused: not tried again
            await eventually(lambda: len(logs) == 1)
            lost[:] = [True] * TRIES
            recorder.node("GPULost", "GPU z is lost", warning=True)
            await eventually(lambda: len(logs) == 2)
            group.cancel_scope.cancel()
    assert [each["problem"] for each in logs][1] == "POST: no answer"
    assert "events is forbidden" in logs[0]["problem"]
    assert (lost, len(fake.of(EVENTS))) == ([], 3)


async def test_events_of_pods_leave_room_for_the_node_s() -> None:
    async with serving() as (fake, api):
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        for number in range(1000):  # a tenant's, made again and again
            recorder.emit(Event(Regarding("Pod", f"p{number}", "ns", f"{number}"), "AllocationRefused", "x"))
        recorder.node("GPULost", "GPU x is lost", warning=True)
        assert recorder.dropped == 1000 - WAITING_OF_PODS
        for number in range(5000):  # senders that are remembered
            sender = Regarding("Pod", f"p{number}", "ns", f"{number}")
            recorder._is_flood(Event(sender, "ContainerEnded", "x"))
        assert len(recorder._sent) == MOST_SENDERS
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            await eventually(lambda: len(fake.of(EVENTS)) == 1)
            group.cancel_scope.cancel()


async def test_a_pod_that_passes_its_cap_again_and_again_writes_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    module = SimpleNamespace(monotonic=lambda: clock[0], time_ns=time.time_ns)
    monkeypatch.setattr("agent.cluster.event_recorder.time", module)
    async with serving() as (fake, api):
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        noisy = Regarding("Pod", "p", "default", "uid")
        # A reading of samples a second for an hour: every fourth finds it above again, with other figures.
        for second in range(0, 3600, 4):
            clock[0] = float(second)
            recorder.emit(Event(noisy, "MemoryCapExceeded", f"uses {second} MiB"))
            while recorder._mailbox.depth:
                await recorder._send(await anext(aiter(recorder._mailbox)))
        assert len(fake.of(EVENTS)) == IN_A_ROW + 3600 // SPARE_SECONDS - 1
        # Another reason, another pod and the node are heard all the same, and this one again later.
        for number in range(2 * IN_A_ROW):
            recorder.emit(Event(noisy, "LimitsResized", f"{number} MiB"))
            await recorder._send(await anext(aiter(recorder._mailbox)))
        written = len(fake.of(EVENTS))
        assert "49 MiB" in fake.of(EVENTS)[-1].body["message"], "of sizes the newest is always told"
        recorder.emit(Event(noisy, "ContainerEnded", "it was ended"))
        recorder.emit(Event(Regarding("Pod", "q", "default", "other"), "MemoryCapExceeded", "uses 1 MiB"))
        for number in range(2 * IN_A_ROW):
            recorder.node("GPULost", f"GPU {number}")
        async with anyio.create_task_group() as group:
            group.start_soon(recorder.run)
            await eventually(lambda: len(fake.of(EVENTS)) == written + 2 + 2 * IN_A_ROW)
            clock[0] += SPARE_SECONDS
            recorder.emit(Event(noisy, "MemoryCapExceeded", "uses 2 MiB"))
            await eventually(lambda: len(fake.of(EVENTS)) == written + 3 + 2 * IN_A_ROW)
            group.cancel_scope.cancel()


async def test_the_memory_of_events_is_bounded() -> None:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        fake.script(EVENTS, objects({}))
        recorder = EventRecorder(api, "n")
        group.start_soon(recorder.run)
        for number in range(3 * WAITING):
            recorder.node("GPULost", str(number))
            await eventually(lambda: len(fake.asked) == number + 1)  # noqa: B023
        assert len(recorder._counts) <= WAITING
        group.cancel_scope.cancel()


async def test_an_event_with_a_key_is_written_once_whoever_wrote_it() -> None:
    async with serving() as (fake, api), anyio.create_task_group() as group:
        path = "/api/v1/namespaces/ns/events"
        fake.script(path, objects({}), status(409, "already exists"), status(500, "broken"), objects({}))
        one, other = EventRecorder(api, "n", "reporter"), EventRecorder(api, "m", "reporter")
        group.start_soon(one.run)
        group.start_soon(other.run)

        def event(message: str, key: str = "full", uid: str = "uid") -> Event:
            return Event(Regarding("Pod", "p", "ns", uid), "WaitingForGPU", message, warning=True, key=key)

        one.emit(event("40 cores are free"))
        await eventually(lambda: len(fake.of(path)) == 1)
        body = fake.asked[0].body
        assert body["source"] == {"component": "reporter", "host": "n"}
        other.emit(event("50 cores are free"))
        await eventually(lambda: len(fake.of(path)) == 2)
        assert fake.asked[1].body["metadata"] == body["metadata"], "the same name conflicts"
        # Both know by now; another reason and a later pod of the same name are other events.
        one.emit(event("30 cores are free"))
        other.emit(event("20 cores are free"))
        one.emit(event("no node offers it", key="no mode"))
        await eventually(lambda: len(fake.of(path)) == 3)
        one.emit(event("no node offers it", key="no mode"))  # what failed is tried again
        one.emit(event("40 cores are free", uid="later"))
        await eventually(lambda: len(fake.of(path)) == 5)
        assert len({each.body["metadata"]["name"] for each in fake.asked}) == 3
        group.cancel_scope.cancel()
