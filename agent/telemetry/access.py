"""Who may read the metrics, which name pods of all tenants: accounts with the right to get /metrics.

As kube-rbac-proxy does it, without a second process: the API server reviews the token and the right. A
verdict is kept for a minute, so that scrapes cost it little, and one that admits for some minutes more while
the API server does not answer: an outage is when figures are looked at. Tokens are kept as digests.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog

from agent.cluster.api import ApiError
from agent.cluster.reviews import Verdict
from agent.web.server import Handler, Reply, Request

log = structlog.get_logger()

PATH = "/metrics"  # whose `get` is asked for, whatever path shows the metrics
FRESH_SECONDS = 60.0
REFUSED_SECONDS = 10.0  # a right that has just been given is seen soon
HELD_SECONDS = 600.0  # without an answer of the API server
REVIEW_SECONDS = 3.0  # within a request's deadline
# Any pod may send any number of tokens that nobody knows. A token that was admitted waits for none of these.
MOST_REVIEWS = 4
REVIEWS_PER_SECOND = 5.0
BURST = 20.0
MOST_ADMITTED = 64
MOST_REFUSED = 256
REMEMBERED_NAMES = 100
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9._~+/-]{1,8192}=*)")
CHALLENGE = {"Content-Type": "text/plain; charset=utf-8", "WWW-Authenticate": 'Bearer realm="metrics"'}


@dataclass(frozen=True, slots=True)
class _Known:
    verdict: Verdict
    at: float


class Admission:
    """Lets callers through to a handler whom the API server admits."""

    def __init__(self, review: Callable[[str], Awaitable[Verdict]], clock: Callable[[], float]) -> None:
        """`review` raises ApiError where there is no answer; `clock` is in seconds."""
        self._review = review
        self._clock = clock
        self._admitted: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused: OrderedDict[bytes, _Known] = OrderedDict()
        self._again = anyio.Lock()  # one review at a time of tokens that were admitted before
        self._reviewing = 0  # tokens that nobody knows
        self._left, self._counted = BURST, clock()
        self._problem: str | None = None
        self._logged: set[str] = set()

    def guarded(self, handler: Handler) -> Handler:
        """The handler, for those alone who are admitted."""

        async def guarded(request: Request) -> Reply:
            refused = await self._refusal(request.headers.get("Authorization", ""))
            return refused or await handler(request)

        return guarded

    async def _refusal(self, authorization: str) -> Reply | None:
        found = _BEARER.fullmatch(authorization.strip())
        if found is None:
            return Reply(b"a bearer token is needed, of an account that may get /metrics\n", 401, CHALLENGE)
        key = hashlib.sha256(found[1].encode()).digest()
        try:
            verdict = await self._verdict(key, found[1])
        except ApiError as error:
            return Reply.text(f"the API server does not say whether the token is good: {error}", 503)
        if verdict is None:
            return Reply.text("too many tokens that nobody knows at once; try again", 503)
        if verdict.allowed:
            return None
        self._log(verdict.user)
        if not verdict.user:
            return Reply(b"the API server does not know this token\n", 401, CHALLENGE)
        return Reply.text(f"{verdict.user} may not get {PATH}: bind it to a ClusterRole with that right", 403)

    async def _verdict(self, key: bytes, token: str) -> Verdict | None:
        """None: too many are asked about. Raises ApiError."""
        if self._fresh(key):
            return self._known(key).verdict
        if key in self._admitted:
            async with self._again:
                return self._known(key).verdict if self._fresh(key) else await self._look_again(key, token)
        if not self._may_review():
            return None
        self._reviewing += 1
        try:
            return self._learn(key, await self._reviewed(token))
        finally:
            self._reviewing -= 1

    async def _look_again(self, key: bytes, token: str) -> Verdict:
        try:
            return self._learn(key, await self._reviewed(token))
        except ApiError:
            known = self._admitted.get(key)
            if known is None or self._clock() - known.at >= HELD_SECONDS:
                raise
            return known.verdict

    async def _reviewed(self, token: str) -> Verdict:
        try:
            verdict = await self._review(token)
        except ApiError as error:
            if self._problem is None:
                log.warning("scrapers_not_reviewed", problem=str(error), admitted_before=len(self._admitted))
            self._problem = str(error)
            raise
        if self._problem is not None:
            log.info("scrapers_reviewed")
        self._problem = None
        return verdict

    def _learn(self, key: bytes, verdict: Verdict) -> Verdict:
        self._admitted.pop(key, None)
        self._refused.pop(key, None)
        known, most = (self._admitted, MOST_ADMITTED) if verdict.allowed else (self._refused, MOST_REFUSED)
        known[key] = _Known(verdict, self._clock())
        while len(known) > most:
            known.popitem(last=False)
        return verdict

    def _known(self, key: bytes) -> _Known:
        return self._admitted.get(key) or self._refused[key]

    def _fresh(self, key: bytes) -> bool:
        admitted, refused = self._admitted.get(key), self._refused.get(key)
        now = self._clock()
        if admitted:
            self._admitted.move_to_end(key)
            return now - admitted.at < FRESH_SECONDS
        return refused is not None and now - refused.at < REFUSED_SECONDS

    def _may_review(self) -> bool:
        now = self._clock()
        self._left = min(BURST, self._left + REVIEWS_PER_SECOND * (now - self._counted))
        self._counted = now
        if self._reviewing >= MOST_REVIEWS or self._left < 1:
            return False
        self._left -= 1
        return True

    def _log(self, user: str) -> None:
        if user not in self._logged and len(self._logged) < REMEMBERED_NAMES:
            self._logged.add(user)
            log.warning("scraper_refused", user=user or "a token that the API server does not know")
