"""Processes and pods that run on a node, by the kubelet and the kernel."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent._proto import v1

T = TypeVar("T")


async def asked(socket: Path, call: Callable[[v1.PodResourcesListerStub], Awaitable[T]]) -> T:
    """One call to PodResources; its rate limit (shared with everybody on the node) is waited out."""
    channel = Channel(path=str(socket))
    try:
        for _ in range(100):
            try:
                return await call(v1.PodResourcesListerStub(channel))
            except GRPCError as error:
                if error.status is not Status.RESOURCE_EXHAUSTED:
                    raise
            await anyio.sleep(0.02)
        raise TimeoutError("PodResources refuse for want of calls per second, 100 times in a row")
    finally:
        channel.close()


def process_in(container_id: str) -> int:
    """The oldest process of a container, by its cgroup."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if container_id in (folder / "cgroup").read_text():
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended
    assert found, f"no process is in container {container_id}"
    return min(found)
