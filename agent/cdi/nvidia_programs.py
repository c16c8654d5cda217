"""NVIDIA's two programs: their names, and whether they are at hand."""

import os
from pathlib import Path

CTK = "nvidia-ctk"
HOOK = "nvidia-cdi-hook"
FOLDER = "bin"  # of the hook on the host, below host.state


def present(folder: Path) -> bool:
    """Whether both lie in a folder. Blocks."""
    return all(os.access(folder / name, os.X_OK) for name in (CTK, HOOK))
