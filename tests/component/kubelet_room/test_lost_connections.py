"""A kubelet that goes away in the middle of a call to PodResources, or as soon as it was reached."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from grpclib.client import Channel

from agent.kubelet.podresources import PodResources, PodResourcesUnavailable

PREFACE = b"PRI * HTTP/2.0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pod-resources").mkdir()
    return tmp_path


@asynccontextmanager
async def _dropping(path: Path) -> AsyncIterator[None]:
    """A kubelet that hangs up as soon as it has been greeted; at least one caller comes."""
    gone = anyio.Event()

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(PREFACE)
        writer.close()
        await writer.wait_closed()
        gone.set()

    async with await asyncio.start_unix_server(drop, path):
        yield
        with anyio.fail_after(10):
            await gone.wait()


async def test_a_deadline_after_a_lost_connection_is_a_deadline(root: Path) -> None:
    # grpclib cancels the task that waits: left as it was, the scope's own cancellation came out of it.
    client = PodResources(root)
    async with _dropping(client.path):
        with anyio.move_on_after(1.0) as scope:
            with pytest.raises(PodResourcesUnavailable, match="Connection lost"):
                await client.list()
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_connection_lost_before_its_first_use_is_a_lost_connection(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, connect = PodResources(root), Channel.__connect__

    async def connect_and_lose(self: Channel) -> object:
        protocol = await connect(self)
        protocol.connection_lost(None)
        return protocol

    monkeypatch.setattr(Channel, "__connect__", connect_and_lose)
    async with _dropping(client.path):
        with pytest.raises(PodResourcesUnavailable, match="the connection was lost at once"):
            await client.list()
