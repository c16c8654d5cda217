"""Runs five requests on the simulated node, and prints as JSON the files of `agent/` that each passes.

Followed is what a request causes, and not what happens meanwhile: a mark in the context of the request (a
context variable), which tasks and worker threads inherit, and which is handed on with an event that wakes
another task. A task that wakes for another reason loses it.
"""

import contextvars
import json
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
from anyio._backends._asyncio import Event

import agent
from agent.app.run import running
from agent.model.demand import VGPU
from agent.simulator.demo.stage import Stage, stage
from agent.simulator.kubelet import ContainerSpec, PodSpec
from agent.simulator.nvml import SimulatedNvml
from agent.vgpu.library import ELF

ROOT = str(Path(agent.__file__).parent) + "/"
ELSEWHERE = ("simulator/", "_proto/")  # the node around the agent, and generated messages
# Where a request comes in: file and function, by journey.
ENTRIES = {
    "pair": {("kubelet/service.py", "_preferred"), ("kubelet/service.py", "_allocate")},
    "scrape": {("web/server.py", "_answer")},
    "label": {("cluster/reflector.py", "_take")},
    "resize": {("cluster/reflector.py", "_take")},
    "Xid": {("inventory/gpu_monitor.py", "_deliver")},
}
# These end with an answer; the others with what the kubelet knows at last, and go on from task to task.
ANSWERED = {"pair", "scrape"}

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
            mark.set(self.armed)
        if self.armed and mark.get() == self.armed:
            self.files[self.armed].add(known)

    @asynccontextmanager
    async def following(self, journey: str) -> AsyncIterator[None]:
        self.armed = journey
        yield
        self.armed = None


def hand_marks_on() -> None:
    """Have events carry the mark of the task that sets them to those that wait for them."""
    marks: dict[int, str | None] = {}
    set_, wait = Event.set, Event.wait

    def marked_set(self: Event) -> None:
        journey = mark.get()
        marks[id(self)] = None if journey in ANSWERED else journey
        set_(self)

    async def marked_wait(self: Event) -> None:
        before, woken = mark.get(), False
        try:
            await wait(self)
            woken = True
        finally:
            if before not in ANSWERED:
                mark.set(marks.get(id(self)) if woken else None)

    Event.set = marked_set  # type: ignore[method-assign]
    Event.wait = marked_wait  # type: ignore[method-assign]


async def until(happens: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
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
        on.kubelet.pod(pod).written["gpu-node-agent.io/resize"] = '{"main": 24}'
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
