"""A reflector that runs against a scripted API server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agent.cluster.reflector import Reflector
from agent.model.pod import Pod
from tests.component.cluster.server import Answer, FakeApi, bookmark, client, event, pod

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
