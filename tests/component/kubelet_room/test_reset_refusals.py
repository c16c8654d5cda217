"""A kubelet that refuses a call to PodResources and resets its stream in the same breath."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded

from agent.kubelet.podresources import PodResources, PodResourcesUnavailable

REFUSAL = [
    (":status", "200"),
    ("content-type", "application/grpc+proto"),
    ("grpc-status", "2"),
    ("grpc-message", "not now"),
]


@asynccontextmanager
async def _refusing(path: Path) -> AsyncIterator[None]:
    """A kubelet whose refusal and reset come in one packet; at least one caller comes."""
    gone = anyio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        writer.write(http.data_to_send())
        while data := await reader.read(65536):
            for event in http.receive_data(data):
                if isinstance(event, StreamEnded):
                    http.send_headers(event.stream_id, REFUSAL)
                    http.reset_stream(event.stream_id)
            writer.write(http.data_to_send())
        writer.close()
        await writer.wait_closed()
        gone.set()

    path.parent.mkdir()
    async with await asyncio.start_unix_server(refuse, path):
        yield
        with anyio.fail_after(10):
            await gone.wait()


async def test_a_deadline_after_a_refusal_with_a_reset_is_a_deadline(tmp_path: Path) -> None:
    # grpclib cancels the task that waits, then raises the refusal and not the lost stream.
    client = PodResources(tmp_path)
    async with _refusing(client.path):
        with anyio.move_on_after(1.0) as scope:
            with pytest.raises(PodResourcesUnavailable, match="not now"):
                await client.list()
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await anyio.sleep_forever()
        assert scope.cancelled_caught
