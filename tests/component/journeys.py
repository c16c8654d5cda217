"""Runs five requests on the simulated node, and prints as JSON the files of `agent/` that each passes.

Followed is what a request causes until it is written, and not what happens meanwhile, so that a slow machine
adds no file: a mark in the context of the request (a context variable), which tasks and worker threads
inherit, and which is handed on with an event that wakes another task, with a value of a cell and with a
message in a mailbox. A task that wakes for another reason, as its period, loses it, and so does one that
takes up anything else. The answer to a write hands nothing on: that is the node's next state.
"""

import contextvars
import json
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import anyio
import anyio.to_thread
from anyio._backends._asyncio import Event

import agent
from agent.app.run import running
from agent.cluster.reflector import Reflector
from agent.kit.tasks import Cell, Mailbox
from agent.model.pod import VGPU
from agent.simulator.demo.stage import Stage, stage
from agent.simulator.kubelet import ContainerSpec, PodSpec
from agent.simulator.nvml import SimulatedNvml
from agent.vgpu.library import ELF

ROOT = str(Path(agent.__file__).parent) + "/"
ELSEWHERE = ("simulator/", "_proto/")  # the node around the agent, and generated messages
RESIZE = "gpu-node-agent.io/resize"
# Where a request comes in: file and function, by journey. What else comes in there is not its doing.
ENTRIES = {
    "pair": {("kubelet/service.py", "_preferred"), ("kubelet/service.py", "_allocate")},
    "scrape": {("web/server.py", "_answer")},
    "label": {("cluster/reflector.py", "_take")},
    "resize": {("cluster/reflector.py", "_take")},
    "Xid": {("inventory/gpu_monitor.py", "_deliver")},
}
# Of the events of watches those with this in their object: of the node, on which a switch waits; of the pod.
EVENT_WITH = {"label": b'"nvidia-device-enable": "vgpu"', "resize": RESIZE.encode()}
# These end with an answer; the others with what the kubelet knows at last, and go on from task to task.
ANSWERED = {"pair", "scrape"}
# A task that pauses for no longer gathers changes, or looks whether something has come; others have a period.
GATHER_SECONDS = 0.5
QUIET_SECONDS = 2 * GATHER_SECONDS

mark: contextvars.ContextVar[str | None] = contextvars.ContextVar("mark", default=None)


class Trace:
    """Files by journey. `armed` is the journey whose entries are looked for."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.files: dict[str, set[str]] = {name: set() for name in ENTRIES}
        self._names: dict[CodeType, str | None] = {}

    def seen(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function."""
        if event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            name = code.co_filename.removeprefix(ROOT)
            inside = name != code.co_filename and not name.startswith(ELSEWHERE) and code.co_name[0] != "<"
            self._names[code] = name if inside else None
        known = self._names[code]
        if known is None:
            return
        if self.armed and (known, code.co_name) in ENTRIES[self.armed]:
            mark.set(self.armed if self._is_request(frame) else None)
        if self.armed and mark.get() == self.armed:
            self.files[self.armed].add(known)

    def _is_request(self, frame: FrameType) -> bool:
        told = EVENT_WITH.get(self.armed or "")
        return told is None or told in bytes(frame.f_locals["event"].object)

    @asynccontextmanager
    async def following(self, journey: str) -> AsyncIterator[None]:
        """Until the context ends and nothing more is reached: time can only leave files out."""
        self.armed = journey
        yield
        seen = 0
        while seen < (seen := len(self.files[journey])):
            await anyio.sleep(QUIET_SECONDS)
        self.armed = None


def hand_marks_on() -> None:
    """Have what wakes another task, and what it takes up, carry the mark of the task that it is from."""
    _events()
    _cells()
    _mailboxes()
    answered = Reflector.answered

    def unmarked_answered(self: Reflector[Any], item: Any) -> None:
        contextvars.Context().run(answered, self, item)

    Reflector.answered = unmarked_answered  # type: ignore[method-assign]
    sleep = anyio.sleep

    async def marked_sleep(delay: float) -> None:
        await sleep(delay)
        if delay > GATHER_SECONDS:
            _take_over(None)

    async def marked_sleep_until(deadline: float) -> None:
        await marked_sleep(max(deadline - anyio.current_time(), 0.0))

    anyio.sleep, anyio.sleep_until = marked_sleep, marked_sleep_until


def _handed() -> str | None:
    return None if (journey := mark.get()) in ANSWERED else journey


def _take_over(handed: str | None) -> None:
    if mark.get() not in ANSWERED:
        mark.set(handed)


def _events() -> None:
    marks: WeakKeyDictionary[Event, str | None] = WeakKeyDictionary()
    set_, wait = Event.set, Event.wait

    def marked_set(self: Event) -> None:
        marks[self] = _handed() or marks.get(self)
        set_(self)

    async def marked_wait(self: Event) -> None:
        woken = False
        try:
            await wait(self)
            woken = True
        finally:
            _take_over(marks.get(self) if woken else None)

    Event.set = marked_set  # type: ignore[method-assign]
    Event.wait = marked_wait  # type: ignore[method-assign]


def _cells() -> None:
    """A task that finds a newer value need not wait for it, and skips those before."""
    marks: WeakKeyDictionary[Cell[Any], tuple[str | None, int]] = WeakKeyDictionary()
    publish, wait_change = Cell.publish, Cell.wait_change

    def marked_publish(self: Cell[Any], value: Any) -> None:
        if journey := _handed():
            marks[self] = journey, self.version + 1
        publish(self, value)

    async def marked_wait_change(self: Cell[Any], seen: int) -> int:
        version = await wait_change(self, seen)
        journey, at = marks.get(self, (None, 0))
        _take_over(journey if at > seen else None)
        return version

    Cell.publish = marked_publish  # type: ignore[method-assign]
    Cell.wait_change = marked_wait_change  # type: ignore[method-assign]


def _mailboxes() -> None:
    marks: WeakKeyDictionary[Mailbox[Any], deque[str | None]] = WeakKeyDictionary()
    put, messages = Mailbox._put, Mailbox.__aiter__

    def marked_put(self: Mailbox[Any], message: Any) -> None:
        marks.setdefault(self, deque()).append(_handed())
        put(self, message)

    async def marked_messages(self: Mailbox[Any]) -> AsyncIterator[Any]:
        async for message in messages(self):
            _take_over(marks[self].popleft())
            yield message

    Mailbox._put = marked_put  # type: ignore[method-assign]
    Mailbox.__aiter__ = marked_messages  # type: ignore[method-assign]


async def until(happens: Callable[[], bool]) -> None:
    with anyio.fail_after(120):
        while not happens():
            await anyio.sleep(0.02)


async def journeys(trace: Trace, on: Stage, serve: Callable[[str], Awaitable[None]], port: int) -> None:
    """All five, one after the other."""
    api = on.kubelet.api
    await serve("pgpu")
    await until(lambda: api.allocatable.get("nvidia.com/gpu") == 8)
    await anyio.sleep(2)
    async with trace.following("label"):
        await serve("vgpu")
        await until(lambda: api.allocatable.get(VGPU.core) == 800)
    await on.run(PodSpec("warm", (ContainerSpec("main", {VGPU.core: 10, VGPU.memory: 8}),)))
    await anyio.sleep(2)
    pod = PodSpec("share", (ContainerSpec("main", {VGPU.core: 30, VGPU.memory: 16}),))
    async with trace.following("pair"):
        await on.run(pod)
    await anyio.sleep(2)
    async with (
        trace.following("scrape"),
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as reply,
    ):
        await reply.read()
    before = api.allocatable.get(VGPU.memory)
    async with trace.following("resize"):
        on.kubelet.pod(pod).written[RESIZE] = '{"main": 24}'
        api.changed()
        await until(lambda: api.allocatable.get(VGPU.memory) != before)
    cores = api.allocatable.get(VGPU.core)
    async with trace.following("Xid"):
        on.machine.xid(on.machine.uuids[3], 79)
        await until(lambda: api.allocatable.get(VGPU.core) != cores)


async def main() -> None:
    trace = Trace()
    hand_marks_on()
    threading.setprofile(trace.seen)  # for all worker threads: before the first
    async with stage("dgx-h200", 60.0, 0.5) as on, on.api() as (http, access):
        library = on.folder / "library.so"
        await anyio.to_thread.run_sync(library.write_bytes, ELF)
        more = {"defaultMode": "none", "vgpu.library": str(library), "vgpu.resize": "true", **access}
        settings = await anyio.to_thread.run_sync(on.settings, more)

        async def serve(mode: str) -> None:
            http.set_label("nvidia-device-enable", mode)

        sys.setprofile(trace.seen)
        async with running(settings, SimulatedNvml(on.machine)) as started:
            await journeys(trace, on, serve, started.core.http.port)
        sys.setprofile(None)
    print(json.dumps({journey: sorted(files) for journey, files in trace.files.items()}))


if __name__ == "__main__":
    anyio.run(main)
