"""Frames of one turn of the event loop leave in one piece, and nothing is lost or stands back."""

import asyncio
from collections.abc import Iterable
from typing import Any

import anyio.lowlevel
import pytest
from h2.exceptions import FrameTooLargeError
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from agent.kubelet.grpc_server import LARGEST, CorkedTransport
from agent.kubelet.wire import DataInRuns

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


async def test_the_end_of_a_stream_leaves_before_whoever_waits_for_a_turn() -> None:
    """An answer that woke others, as each Allocate does, left only after all of them had run."""
    plain, seen = Plain(), list[int]()
    corked = CorkedTransport(plain)
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(plain.pieces)))
    message, trailers = DataFrame(1, b"answer"), HeadersFrame(1, b"status", flags=["END_HEADERS"])
    corked.write(message.serialize())
    assert not plain.pieces
    trailers.flags.add("END_STREAM")
    corked.write(WindowUpdateFrame(1, window_increment=7).serialize() + trailers.serialize())
    await anyio.lowlevel.checkpoint()
    assert seen == [1]
    assert [type(each) for each in _read(FrameBuffer(), plain.pieces)] == [
        DataFrame,
        WindowUpdateFrame,
        HeadersFrame,
    ]


@pytest.mark.parametrize("more", [b"", b"cut", b"cut before its end"])
async def test_what_ends_no_stream_waits_for_the_turn(more: bytes) -> None:
    """The bit that ends a stream stands for something else on other frames."""
    plain = Plain()
    corked = CorkedTransport(plain)
    corked.write(SettingsFrame(0, flags=["ACK"]).serialize() + DataFrame(1, b"x").serialize() + more)
    assert not plain.pieces


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


def _frames() -> list[Any]:
    """Data of two streams, with what may stand between: headers, padding, an end, an empty frame."""
    made: list[Any] = []
    for number, stream in enumerate((1, 1, 1, 3, 1, 1, 3, 3, 1, 1, 1, 1)):
        frame = DataFrame(stream)
        frame.data = bytes((number,)) * (number * 100)
        made.append(frame)
    made[8].flags.add("PADDED")
    made[8].pad_length = 5
    made[11].flags.add("END_STREAM")
    made.insert(3, WindowUpdateFrame(1, window_increment=7))
    return made


def _read(buffer: FrameBuffer, pieces: Iterable[bytes], largest: int = 2000) -> list[Frame]:
    buffer.max_frame_size = largest
    found: list[Frame] = []
    for piece in pieces:
        buffer.add_data(piece)
        found += buffer
    return found


def _together(frames: Iterable[Any]) -> list[object]:
    """The words of frames, with plain data of one stream in a row put together."""
    said: list[list[Any]] = []
    for frame in frames:
        plain = isinstance(frame, DataFrame) and not frame.flags
        if plain and said and said[-1][:2] == [True, frame.stream_id]:
            said[-1][2] += frame.data
        elif plain:
            said.append([True, frame.stream_id, frame.data])
        else:
            said.append([False, frame.serialize()])
    return list(said)


@pytest.mark.parametrize("size", [1, 7, 250, 1000, 1 << 20])
def test_data_in_a_row_is_one_frame_however_it_comes(size: int) -> None:
    sent = b"".join(frame.serialize() for frame in _frames())
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    found = _read(DataInRuns(), pieces)
    assert _together(found) == _together(_read(FrameBuffer(), pieces))
    if size > len(sent):
        assert len(found) == 9  # of 13


def test_a_piece_of_data_that_is_too_long_ends_the_connection() -> None:
    first, long = DataFrame(1, b"a" * 100), DataFrame(1, b"a" * 101)
    with pytest.raises(FrameTooLargeError):
        _read(DataInRuns(), [first.serialize() + long.serialize()], largest=100)
