"""A container as the enforcement library sees one: a folder with it, a limit file and a usage region."""

import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.vgpu import layout
from clib.build_library import NAME
from tests.cuda_double.machine import MIB, CudaGpu

CONTEXT_MIB: Final = 300
CHEAP_MIB: Final = 4  # a context on the GPU of the fixture `gpu`
SLOTS_AT: Final = 69632
SLOT_BYTES: Final = 384
_CONTEXT_AT, _FLAGS_AT, _CRC_AT = 40, 80, 108


@dataclass(frozen=True, slots=True)
class Container:
    """The folder that is mounted into a container."""

    folder: Path

    @property
    def library(self) -> Path:
        """To be preloaded."""
        return self.folder / NAME

    @property
    def limits(self) -> Path:
        """The limit file."""
        return self.folder / "limits"

    @property
    def usage(self) -> Path:
        """The usage region."""
        return self.folder / "usage"

    @property
    def environment(self) -> dict[str, str]:
        """The substitute for /etc/ld.so.preload."""
        return {"LD_PRELOAD": str(self.library)}

    def charged(self, gpu: int = 0) -> int:
        """Bytes that the library has charged."""
        return layout.read_usage(self.usage.read_bytes())[gpu].total_bytes

    def peak(self, gpu: int = 0) -> int:
        """The most bytes that the library has ever charged."""
        return layout.read_usage(self.usage.read_bytes())[gpu].peak_bytes

    def slots(self) -> list[tuple[int, int, int]]:
        """(pid, launches, bytes on the first GPU) of each slot in use."""
        content = self.usage.read_bytes()
        found = []
        for number in range(2048):
            at = SLOTS_AT + number * SLOT_BYTES
            pid, state, _, _, _, launches = struct.unpack_from("<IIQQQQ", content, at)
            if state:
                found.append((pid, launches, struct.unpack_from("<Q", content, at + 128)[0]))
        return found

    def set_limit(self, megabytes: int, *, gpu: int = 0) -> None:
        """Change a cap in place, as the agent does."""
        content = bytearray(self.limits.read_bytes())
        places = [512 + gpu * 256, 512 + gpu * 256 + 112]
        generations = [struct.unpack_from("<Q", content, place)[0] for place in places]
        newest = generations.index(max(generations))
        copy = bytearray(content[places[newest] : places[newest] + 112])
        struct.pack_into("<Q", copy, 0, max(generations) + 1)
        struct.pack_into("<Q", copy, 24, megabytes * MIB)
        struct.pack_into("<I", copy, _CRC_AT, zlib.crc32(copy[:_CRC_AT]))
        descriptor = os.open(self.limits, os.O_WRONLY)
        try:
            os.pwrite(descriptor, copy, places[1 - newest])
        finally:
            os.close(descriptor)


def make(
    folder: Path,
    library: Path,
    caps: Sequence[int],
    *,
    context: int = CONTEXT_MIB,
    strict: bool = False,
    gpus: Sequence[CudaGpu] = (CudaGpu(),),
) -> Container:
    """A container with a cap in MiB for each GPU."""
    folder.mkdir(parents=True)
    made = Container(folder)
    shutil.copy(library, made.library)
    wanted = [
        layout.DeviceLimits(
            gpu=gpu.uuid, memory_bytes=cap * MIB, cores=50, strict=strict, driver=False, unseen_bytes=0
        )
        for gpu, cap in zip(gpus, caps, strict=True)
    ]
    content = bytearray(layout.limit_file("test", wanted))
    for number in range(len(wanted)):
        at = 512 + number * 256
        struct.pack_into("<Q", content, at + _CONTEXT_AT, context * MIB)
        struct.pack_into("<I", content, at + _CRC_AT, zlib.crc32(content[at : at + _CRC_AT]))
    made.limits.write_bytes(content)
    made.limits.chmod(0o444)
    made.usage.write_bytes(layout.usage_head(len(wanted)))
    os.truncate(made.usage, layout.USAGE_BYTES)
    made.usage.chmod(0o666)
    return made


def hold(container: Container, share: int | None, factor: float = 1.0) -> None:
    """Hold a container to a share in percent, as the agent does; None: to none."""
    descriptor = os.open(container.limits, os.O_RDWR)
    try:
        now = layout.read_limits(os.pread(descriptor, layout.LIMITS_BYTES, 0))[0]
        wanted = replace(now, compute=share is not None, share=(share or 0) * 100, correction=factor)
        layout.write_limits(descriptor, 0, wanted)
    finally:
        os.close(descriptor)
