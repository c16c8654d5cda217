"""`kubelet.sock`: whether a kubelet serves there, and whether it is still the same one."""

from contextlib import suppress
from pathlib import Path

import anyio

CONNECT_SECONDS = 1.0

# Inode and time of change: a kubelet makes its socket again at each start, often with the same inode.
Identity = tuple[int, int]


class KubeletSocket:
    """The socket that every kubelet makes again when it starts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def identity(self) -> Identity | None:
        """Which socket file lies there; None: none. The kubelet leaves it behind when it ends."""
        with suppress(OSError):
            found = await anyio.Path(self.path).stat()
            return found.st_ino, found.st_ctime_ns
        return None

    async def serves(self) -> Identity | None:
        """The identity of the socket file if somebody accepts connections there, else None."""
        before = await self.identity()
        with anyio.move_on_after(CONNECT_SECONDS), suppress(OSError):
            async with await anyio.connect_unix(self.path):
                return before
        return None
