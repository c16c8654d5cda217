"""One agent at a time for one daemon."""

import anyio.to_thread

from agent.kit.lock import Taken, exclusive
from agent.mps.directories import Directories
from agent.mps.errors import MpsError


class Locked:
    """Holds a daemon's lock while the context is open. Raises MpsError when another process has it."""

    def __init__(self, folders: Directories) -> None:
        self._lock = exclusive(folders.lock)
        self._folders = folders

    async def __aenter__(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._lock.__enter__)
        except Taken as error:
            raise MpsError(f"another agent looks after this MPS daemon: {error}") from error
        except OSError as error:
            raise MpsError(f"{self._folders.lock}: cannot be locked: {error.strerror}") from error

    async def __aexit__(self, *_: object) -> None:
        self._lock.__exit__(None, None, None)
