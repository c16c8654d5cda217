"""Putting a file in place in one step: readers find the old content or the new one, never a part of it."""

import os
import tempfile
from pathlib import Path

# Of the names of drafts; one without a writer is what an agent that was killed had begun.
DRAFT = ".gpu-node-agent-"


def write(folder: Path, name: str, content: bytes, mode: int = 0o644, lasting: bool = False) -> None:
    """Write `folder/name`; the folder is made where it is missing. Blocks. Raises OSError.

    `lasting`: it is on disk when this returns, and there after a power cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A dot file with another suffix: programs that read every .json in a folder pass it by.
    descriptor, draft = tempfile.mkstemp(prefix=DRAFT, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        Path(draft).replace(folder / name)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    if lasting:
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)
