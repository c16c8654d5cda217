"""A kubelet that goes away or refuses in the middle of a call to PodResources."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from grpclib.client import Channel
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded

from agent.kubelet.podresources import PodResources, PodResourcesUnavailable

PREFACE = b"PRI * HTTP/2.0"
REFUSAL = [
    (":status", "200"),
    ("content-type", "application/grpc+proto"),
    ("grpc-status", "2"),
    ("grpc-message", "not now"),
]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pod-resources").mkdir()
    return tmp_path


async def _drop(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Hang up as soon as the caller has greeted."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readuntil(PREFACE)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuse each call and reset its stream, in one packet."""
    http = H2Connection(H2Configuration(client_side=False))
    http.initiate_connection()
    writer.write(http.data_to_send())
    while data := await reader.read(65536):
        for event in http.receive_data(data):
            if isinstance(event, StreamEnded):
                http.send_headers(event.stream_id, REFUSAL)
                http.reset_stream(event.stream_id)
        writer.write(http.data_to_send())


@asynccontextmanager
async def _kubelet(path: Path, answer: Answer = _drop) -> AsyncIterator[None]:
    """A kubelet that answers so and hangs up; at least one caller comes."""
    gone = anyio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        await writer.wait_closed()
        gone.set()

    async with await asyncio.start_unix_server(serve, path):
        yield
        with anyio.fail_after(10):
            await gone.wait()


async def _deadline_stays_one(client: PodResources, answer: Answer, said: str) -> None:
    """grpclib cancels the task that waits: left as it was, the scope's own cancellation came out of it."""
    async with _kubelet(client.path, answer):
        with anyio.move_on_after(1.0) as scope:
            with pytest.raises(PodResourcesUnavailable, match=said):
                await client.list()
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_deadline_after_a_lost_connection_is_a_deadline(root: Path) -> None:
    await _deadline_stays_one(PodResources(root), _drop, "Connection lost")


async def test_a_deadline_after_a_refusal_with_a_reset_is_a_deadline(root: Path) -> None:
    # The refusal is raised then, and not the lost stream.
    await _deadline_stays_one(PodResources(root), _refuse, "not now")


async def test_a_connection_lost_before_its_first_use_is_a_lost_connection(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, connect = PodResources(root), Channel.__connect__

    async def connect_and_lose(self: Channel) -> object:
        protocol = await connect(self)
        protocol.connection_lost(None)
        return protocol

    monkeypatch.setattr(Channel, "__connect__", connect_and_lose)
    async with _kubelet(client.path):
        with pytest.raises(PodResourcesUnavailable, match="the connection was lost at once"):
            await client.list()
