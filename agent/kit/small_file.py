"""Reading a small file that somebody else writes, whatever it turns out to be."""

import os
import stat
from pathlib import Path

LONGEST_BYTES = 4096


def read_text(file: Path, most: int = LONGEST_BYTES) -> str:
    """The first `most` bytes of a regular file as UTF-8. Blocks, but for no more than a disk takes.

    A pipe would keep its reader for ever, a device or a huge file would fill the memory. Raises OSError,
    UnicodeDecodeError.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is no regular file")
        return os.read(descriptor, most).decode()
    finally:
        os.close(descriptor)
