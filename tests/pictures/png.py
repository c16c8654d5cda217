"""Screenshots with a palette of 256 colours: a third of the bytes, and text as sharp."""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.pictures import svg

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = 256
KEPT = [bytes.fromhex(colour[1:]) for colour in svg.COLOURS]  # of thin lines


def smaller(picture: bytes) -> bytes:
    """The same picture; colours beyond ours and the most frequent become the nearest of them."""
    width, height, rows = _decoded(picture)
    counts = Counter(pixel for row in rows for pixel in row)
    frequent = (colour for colour, _ in counts.most_common())
    palette = list(dict.fromkeys([*(colour for colour in KEPT if colour in counts), *frequent]))[:COLOURS]
    places = {colour: number for number, colour in enumerate(palette)}
    for colour in counts.keys() - places.keys():
        places[colour] = min(range(len(palette)), key=lambda at: _distance(palette[at], colour))
    lines = b"".join(b"\0" + bytes(places[pixel] for pixel in row) for row in rows)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(palette)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _distance(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _decoded(picture: bytes) -> tuple[int, int, Sequence[Sequence[bytes]]]:
    """Width, height, and pixels of three bytes by row. Raises ValueError: another kind of picture."""
    head, data = b"", b""
    for kind, content in _chunks(picture):
        head, data = (content, data) if kind == b"IHDR" else (head, data + content * (kind == b"IDAT"))
    width, height, depth, colours, *_, interlaced = struct.unpack(">IIBBBBB", head)
    if depth != 8 or colours not in (2, 6) or interlaced:
        raise ValueError(f"a screenshot with depth {depth}, colour type {colours}, interlace {interlaced}")
    size = 3 if colours == 2 else 4
    raw, length = zlib.decompress(data), 1 + width * size
    rows, above = [], bytes(width * size)
    for start in range(0, height * length, length):
        above = _unfiltered(raw[start], bytearray(raw[start + 1 : start + length]), above, size)
        rows.append([above[at : at + 3] for at in range(0, width * size, size)])
    return width, height, rows


def _chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        yield picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]
        at += 12 + length


def _unfiltered(kind: int, row: bytearray, above: bytes, size: int) -> bytes:
    """A row without its filter (PNG specification, chapter 9)."""
    for at in range(len(row)) if kind else ():
        left, corner = (row[at - size], above[at - size]) if at >= size else (0, 0)
        up = above[at]
        guess = _paeth(left, up, corner) if kind == 4 else (0, left, up, (left + up) // 2)[kind]
        row[at] = (row[at] + guess) & 0xFF
    return bytes(row)


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda each: abs(guess - each))
