"""Problems of limit folders in the log: when they begin, and not again before they have ended."""

from collections.abc import Collection

import structlog

log = structlog.get_logger()


class Problems:
    """Folders that one reader cannot read now."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def met(self, key: str, problem: object) -> None:
        """A usage region could not be read."""
        if key not in self._open:
            self._open.add(key)
            log.info("usage_unreadable", folder=key, problem=str(problem))

    def over(self, key: str) -> None:
        """It could be."""
        self._open.discard(key)

    def keep(self, keys: Collection[str]) -> None:
        """Forget folders that are gone."""
        self._open.intersection_update(keys)
