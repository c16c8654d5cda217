"""Finding NVIDIA's `nvidia-cuda-mps-control`: in the driver root or on PATH."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from agent.mps.errors import ProgramMissing

CONTROL = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
FOLDERS = ("usr/bin", "bin", "usr/local/bin", "opt/bin", "usr/sbin", "run/current-system/sw/bin")


@dataclass(frozen=True, slots=True)
class Program:
    """The control program and the root in which it must run."""

    path: Path  # as the agent sees it
    root: Path = Path("/")  # the driver root whose libraries it needs; "/" is the agent's own

    @property
    def inner(self) -> str:
        """The path as seen inside `root`."""
        return str(self.path) if self.root == Path("/") else f"/{self.path.relative_to(self.root)}"


def find(driver_root: Path, explicit: Path | None = None, search: str | None = None) -> Program:
    """The program. Blocks on files. `search` is a PATH, the process's own if None. Raises ProgramMissing."""
    if explicit is not None:
        if not os.access(explicit, os.X_OK):
            raise ProgramMissing(
                f"mps.controlProgram names {explicit}, which is no program; correct the configuration"
            )
        return Program(explicit)
    for folder in FOLDERS:
        candidate = driver_root / folder / CONTROL
        if os.access(candidate, os.X_OK):
            return Program(candidate, driver_root)
    on_path = shutil.which(CONTROL, path=search)
    if on_path:
        return Program(Path(on_path))
    raise ProgramMissing(
        f"{CONTROL} is neither below {driver_root} nor on PATH: install the driver's MPS package "
        "(nvidia-cuda-mps on Debian, nvidia-compute-utils on Ubuntu), mount the driver root and set "
        "driver.root, or set mps.controlProgram"
    )
