"""A container with limits, as the enforcement library sees one: its folder, and no more."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.vgpu import layout

VARIABLE = "GPU_TEST_LIMITS"  # the folder of a library that is built already: there is no compiler offline
NAME = "libgna-limits.so"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Capped:
    """The folder, and the GPU that it caps."""

    folder: Path
    gpu: str  # UUID

    @property
    def environment(self) -> dict[str, str]:
        """The substitute for a container's /etc/ld.so.preload."""
        return {"LD_PRELOAD": str(self.folder / NAME)}

    @property
    def usage(self) -> layout.CountedUsage:
        """The library's counts. Blocks."""
        return layout.read_usage((self.folder / "usage").read_bytes())[0]

    def resize(self, mebibytes: int) -> None:
        """Another cap, in force at once, as the agent writes it. Blocks."""
        self._change(memory_bytes=mebibytes * MIB)

    def hold(self, percent: float, factor: float = 1.0, rivals: float | None = None) -> None:
        """Hold it to a share of compute, corrected by a factor, as the agent does. Blocks."""
        self._change(compute=True, share=round(percent * 100), correction=factor, rivals=rivals)

    def _change(self, **values: Any) -> None:
        descriptor = os.open(self.folder / "limits", os.O_RDWR)
        try:
            now = layout.read_limits(os.pread(descriptor, layout.LIMITS_BYTES, 0))[0]
            layout.write_limits(descriptor, 0, replace(now, **values))
        finally:
            os.close(descriptor)


def capped(folder: Path, gpu: str, mebibytes: int) -> Capped:
    """A new one. Blocks; builds the library unless VARIABLE names one. Raises OSError, BuildError."""
    folder.mkdir()
    shutil.copy(_library(), folder / NAME)
    (folder / "limits").write_bytes(layout.limit_file("test", [layout.DeviceLimits(gpu, mebibytes * MIB)]))
    (folder / "limits").chmod(0o444)
    (folder / "usage").write_bytes(layout.usage_head(1))
    os.truncate(folder / "usage", layout.USAGE_BYTES)
    (folder / "usage").chmod(0o666)
    return Capped(folder, gpu)


def _library() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given) / NAME
    from clib.build_library import cached

    return cached()
