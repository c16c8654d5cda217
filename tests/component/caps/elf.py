"""As much of a 64-bit little-endian ELF file as says what its loader will do with it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_LOAD, _DYNAMIC = 1, 2  # p_type
_NEEDED, _STRTAB, _VERNEED, _VERNEEDNUM = 1, 5, 0x6FFFFFFE, 0x6FFFFFFF
RUNS_CODE: Final = {
    12: "DT_INIT",
    13: "DT_FINI",
    25: "DT_INIT_ARRAY",
    26: "DT_FINI_ARRAY",
    32: "DT_PREINIT_ARRAY",
}
"""Tags of what the loader calls when an object comes and goes."""


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Its dynamic section."""

    needed: frozenset[str]
    tags: frozenset[int]
    versions: dict[str, frozenset[str]] = field(default_factory=dict)
    """Library -> versions that are asked of its symbols: `GLIBC_2.17`."""


def read(path: Path) -> SharedObject:
    """The dynamic section of a shared object."""
    content = path.read_bytes()
    assert content[:6] == b"\x7fELF\x02\x01", "64 bits, little endian"
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", content, table + number * size) for number in range(count)]

    def offset_of(address: int) -> int:
        loaded = [(it[2], it[3], it[5]) for it in headers if it[0] == _LOAD]
        (found,) = (at + address - start for at, start, length in loaded if 0 <= address - start < length)
        return int(found)

    (dynamic,) = (it for it in headers if it[0] == _DYNAMIC)
    entries = [struct.unpack_from("<QQ", content, dynamic[2] + at) for at in range(0, dynamic[5], 16)]
    entries = entries[: entries.index((0, 0))]
    one = dict(entries)
    strings = offset_of(one[_STRTAB])

    def text(at: int) -> str:
        return content[strings + at : content.index(b"\0", strings + at)].decode()

    def versions() -> Iterator[tuple[str, frozenset[str]]]:
        at = offset_of(one[_VERNEED]) if _VERNEED in one else 0
        for _ in range(one.get(_VERNEEDNUM, 0)):
            _, names, file, first, following = struct.unpack_from("<HHIII", content, at)
            found, name_at = [], at + first
            for _ in range(names):
                _, _, _, name, step = struct.unpack_from("<IHHII", content, name_at)
                found.append(text(name))
                name_at += step
            yield text(file), frozenset(found)
            at += following

    needed = frozenset(text(value) for tag, value in entries if tag == _NEEDED)
    return SharedObject(needed, frozenset(tag for tag, _ in entries), dict(versions()))
