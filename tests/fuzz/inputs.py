"""Bytes made of samples by seeded mutation: the same seed and number give the same input on every machine."""

import random
from collections.abc import Callable, Iterator, Sequence

LONGEST = 64 << 10
# What has brought readers down elsewhere: numbers that int() refuses, digits that are none, text that is no
# UTF-8, nesting, and what would lead out of a folder.
TOKENS = (
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"\r\n",
    b"\t",
    b"9" * 5000,
    b"-1",
    b"1e999",
    b"NaN",
    b"0x41",
    "²".encode(),
    "٣".encode(),
    b'"\\ud800"',
    b"[" * 3000,
    b'{"a":' * 3000,
    b"../../../etc/passwd",
    b"%s%n",
    b'"',
    b"\\",
    b"{",
    b"}",
    b",",
    b":",
    b"null",
    b"true",
    b"GPU-",
    b"::",
    b"a" * 8200,
)


def inputs(
    name: str, seed: int, count: int, samples: Sequence[bytes], tokens: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """`count` inputs; the samples themselves come first. `tokens` are inserted beside the usual ones."""
    words = (*TOKENS, *tokens, *tokens)
    for number in range(count):
        if number < len(samples):
            yield samples[number]
        else:
            draw = random.Random(f"{name} {seed} {number}")
            yield mutated(draw, samples, words)


def mutated(draw: random.Random, samples: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A sample with some mutations, or, seldom, nothing of it."""
    if draw.random() < 0.02:
        return draw.randbytes(draw.randrange(200))
    data = bytearray(draw.choice(samples))
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        draw.choice(MUTATIONS)(draw, data, samples, words)
    return bytes(data[:LONGEST])


Mutation = Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None]


def _place(draw: random.Random, data: bytearray) -> int:
    return draw.randrange(len(data) + 1)


def _span(draw: random.Random, data: bytearray) -> slice:
    start = _place(draw, data)
    return slice(start, start + draw.choice((1, 1, 2, 4, 8, 30, 200)))


def _flip(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _replace(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.randrange(256)


def _insert(draw: random.Random, data: bytearray, _: Sequence[bytes], words: Sequence[bytes]) -> None:
    place = _place(draw, data)
    data[place:place] = draw.choice(words)


def _overwrite(draw: random.Random, data: bytearray, _: Sequence[bytes], words: Sequence[bytes]) -> None:
    data[_span(draw, data)] = draw.choice(words)


def _delete(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    del data[_span(draw, data)]


def _repeat(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    span = _span(draw, data)
    data[span] = bytes(data[span]) * draw.choice((2, 3, 10, 100))
    del data[LONGEST:]


def _truncate(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    del data[_place(draw, data) :]


def _splice(draw: random.Random, data: bytearray, samples: Sequence[bytes], _: Sequence[bytes]) -> None:
    other = draw.choice(samples)
    data[_place(draw, data) :] = other[draw.randrange(len(other) + 1) :]


def _number(draw: random.Random, data: bytearray, _: Sequence[bytes], __: Sequence[bytes]) -> None:
    """One of the numbers in it becomes another."""
    digits = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        place = draw.choice(digits)
        choices = (0, 1, -1, 255, 65536, 1 << 31, 1 << 63, 1 << 64, 10**30, draw.randrange(1000))
        data[place : place + 1] = str(draw.choice(choices)).encode()


MUTATIONS: Sequence[Mutation] = (
    _flip,
    _replace,
    _insert,
    _overwrite,
    _delete,
    _repeat,
    _truncate,
    _splice,
    _number,
)
