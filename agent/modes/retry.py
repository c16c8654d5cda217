"""When set-ups that failed are tried again: all of a node together, at ever longer intervals."""

import anyio

from agent.kit.backoff import Backoff

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 1800.0


class Retry:
    """The node's one clock for failed set-ups."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self._at: float | None = None
        self._depends_on: object = None

    @property
    def seconds(self) -> float | None:
        """Until the next try; None: none is waited for."""
        return None if self._at is None else max(0.05, self._at - anyio.current_time())

    def failed(self, depends_on: object) -> None:
        """A round of tries is over, and some failed; again is nothing.

        `depends_on`: what the outcome may depend on, compared by value; once it differs the next try is due.
        """
        if self._at is None:
            self._depends_on = depends_on
            self._at = anyio.current_time() + self._backoff.next()

    def due(self, depends_on: object) -> bool:
        """Whether to try again now; if so, the round has begun."""
        if self._at is None:
            return False
        if depends_on != self._depends_on:
            self._backoff.reset()
        elif anyio.current_time() < self._at:
            return False
        self._at = None
        return True

    def reset(self) -> None:
        """Nothing failed, or something else is wanted."""
        self._backoff.reset()
        self._at = None
