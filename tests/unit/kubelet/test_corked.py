"""Frames of one turn of the event loop leave in one piece, and nothing is lost or stands back."""

import asyncio
from typing import Any

import anyio.lowlevel
import pytest
from hyperframe.frame import DataFrame, Frame

from agent.kubelet.grpc_server import LARGEST, CorkedTransport

pytestmark = pytest.mark.anyio


class Plain(asyncio.Transport):
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = ""

    def write(self, data: Any) -> None:
        assert not self.ended
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_write_buffer_size(self) -> int:
        return 7


async def test_one_turn_is_one_piece() -> None:
    plain = Plain()
    corked = CorkedTransport(plain)
    for data in (b"headers", b"message", b"trailers"):
        corked.write(data)
    assert (plain.pieces, corked.get_write_buffer_size()) == ([], 22 + 7)
    await anyio.lowlevel.checkpoint()
    corked.write(b"next")
    await anyio.lowlevel.checkpoint()
    assert (plain.pieces, corked.get_write_buffer_size()) == ([b"headersmessagetrailers", b"next"], 7)


async def test_much_leaves_at_once() -> None:
    plain = Plain()
    corked = CorkedTransport(plain)
    corked.write(b"a")
    corked.write(b"b" * LARGEST)
    assert plain.pieces == [b"a" + b"b" * LARGEST]


async def test_a_close_sends_the_rest_and_an_abort_does_not() -> None:
    closed, aborted = Plain(), Plain()
    for plain, end in ((closed, CorkedTransport.close), (aborted, CorkedTransport.abort)):
        corked = CorkedTransport(plain)
        corked.write(b"rest")
        end(corked)
    await anyio.lowlevel.checkpoint()
    assert (closed.pieces, closed.ended) == ([b"rest"], "closed")
    assert (aborted.pieces, aborted.ended) == ([], "aborted")


async def test_no_received_frame_is_written_out_for_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """h2 describes each to a logger that drops the text."""
    written: list[Frame] = []
    monkeypatch.setattr(DataFrame, "serialize_body", written.append)
    assert "DataFrame" in repr(DataFrame(1, b"x" * 16384))
    assert not written
