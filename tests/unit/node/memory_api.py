"""An API server in memory that holds one node: it may be slow, silent or refuse, and remembers its writes."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from agent.cluster.api import ApiRefused, ApiUnavailable, KubeApi
from agent.kit.tasks import Cell
from agent.node.capacity import TAINT

NODE = "/api/v1/nodes/n"
Act = Callable[[], bytes]


@dataclass(frozen=True)
class Written:
    """One write as it came in."""

    at: float
    what: str  # "taint", "untaint", "status"


class MemoryApi(KubeApi):
    """`interfere` is awaited with the number of each write and what carries it out, in place of that."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.node: dict[str, Any] = {
            "metadata": {"name": "n", "uid": "u", "resourceVersion": "1", "labels": {}},
            "spec": {},
            "status": {"capacity": {}, "allocatable": {}},
        }
        self.writes: list[Written] = []
        self.interfere: Callable[[int, Act], Awaitable[bytes]] | None = None
        self.silent = False  # open watches bring nothing
        self.refuse_watch = 0  # with this HTTP status
        self.versions = Cell(1)
        self._late: set[asyncio.Task[bytes]] = set()

    # What a test sees and sets

    @property
    def tainted(self) -> bool:
        """Whether the agent's taint stands."""
        return any(each["key"] == TAINT for each in self.node["spec"].get("taints") or ())

    @property
    def allocatable(self) -> dict[str, int]:
        """As the scheduler counts it, without what is 0."""
        found = self.node["status"]["allocatable"]
        return {name: int(count) for name, count in found.items() if int(count)}

    def of(self, what: str) -> list[Written]:
        """The writes of one kind."""
        return [one for one in self.writes if one.what == what]

    def change(self, act: Callable[[dict[str, Any]], None]) -> None:
        """Somebody else changes the node."""
        act(self.node)
        self._changed()

    async def carry_out_later(self, seconds: float, act: Act) -> bytes:
        """Carry out a write so late, whether or not the caller still waits."""

        async def late() -> bytes:
            await asyncio.sleep(seconds)
            return act()

        task = asyncio.get_running_loop().create_task(late())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return await asyncio.shield(task)

    # What the agent asks

    async def get(self, path: str, query: Mapping[str, str] | None = None, deadline: float = 5.0) -> bytes:
        await anyio.sleep(0.001)
        return json.dumps({"items": [self.node]}).encode()

    async def json_patch(
        self, path: str, operations: Sequence[Mapping[str, Any]], deadline: float = 5.0
    ) -> bytes:
        assert [each["op"] for each in operations] == ["test", "add"]
        before, after = (each["value"] for each in operations)
        what = "taint" if any(each["key"] == TAINT for each in after) else "untaint"

        def act() -> bytes:
            if (self.node["spec"].get("taints") or None) != before:
                raise ApiRefused(422, "the test failed")
            self.node["spec"]["taints"] = after
            return self._changed()

        return await self._write(what, act, deadline)

    async def merge_patch(self, path: str, body: Any, deadline: float = 5.0) -> bytes:
        assert path == f"{NODE}/status"

        def act() -> bytes:
            for part, amounts in body["status"].items():
                self.node["status"][part] |= amounts
            return self._changed()

        return await self._write("status", act, deadline)

    async def _write(self, what: str, act: Act, deadline: float) -> bytes:
        number = len(self.writes)
        self.writes.append(Written(anyio.current_time(), what))
        with anyio.move_on_after(deadline):
            await anyio.sleep(0.005)
            return await self.interfere(number, act) if self.interfere else act()
        raise ApiUnavailable("the API server did not answer in time")

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], silence: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        if self.refuse_watch:
            raise ApiRefused(self.refuse_watch, f"no watch: {self.refuse_watch}")
        yield self._events("resourceVersion" not in query)

    async def _events(self, initial: bool) -> AsyncIterator[bytes]:
        seen = self.versions.version
        if initial:
            yield _line("ADDED", self.node)
            end = {"k8s.io/initial-events-end": "true"}
            yield _line("BOOKMARK", {"metadata": {**self.node["metadata"], "annotations": end}})
        while not self.refuse_watch:
            seen = await self.versions.wait_change(seen)
            await anyio.sleep(0.003)
            while self.silent:
                await anyio.sleep(0.01)
            if not self.refuse_watch:
                yield _line("MODIFIED", self.node)

    def _changed(self) -> bytes:
        version = int(self.node["metadata"]["resourceVersion"]) + 1
        self.node = copy.deepcopy(self.node)
        self.node["metadata"]["resourceVersion"] = str(version)
        self.versions.publish(version)
        return json.dumps(self.node).encode()


def _line(kind: str, item: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode()
