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
from typing import TypeVar

import anyio
import structlog

from agent.cluster.api import ApiError
from agent.cluster.reviews import TokenVerdict
from agent.web.server import Handler, HttpRequest, Reply

log = structlog.get_logger()

PATH = "/metrics"  # whose `get` is asked for, whatever path shows the metrics
FRESH_SECONDS = 60.0
REFUSED_SECONDS = 10.0  # a right that has just been given is seen soon
HELD_SECONDS = 600.0  # without an answer of the API server
REVIEW_SECONDS = 3.0  # within a request's deadline
SILENT_SECONDS = 10.0  # after a review without an answer, before another one is made of a token that is held
# Any pod may send any number of tokens that nobody knows. A token that was admitted waits for none of these,
# and a new one of an address that was admitted for none of other addresses: kubelets renew tokens.
MOST_REVIEWS, OF_ADDRESS = 4, 2  # at a time, in all and of one address
KEPT_REVIEWS = 1  # for addresses that were admitted
REVIEWS_PER_SECOND, OF_ADDRESS_PER_SECOND = 5.0, 1.0
BURST, OF_ADDRESS_BURST = 20.0, 5.0
MOST_ADDRESSES = 256
MOST_ADMITTED = 64
MOST_REFUSED = 256
REMEMBERED_NAMES = 100
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([A-Za-z0-9._~+/-]{1,8192}=*)")
CHALLENGE = {"Content-Type": "text/plain; charset=utf-8", "WWW-Authenticate": 'Bearer realm="metrics"'}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Known:
    verdict: TokenVerdict
    at: float


class _Bucket:
    """A bound on reviews: so many at once, and so many a second."""

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst, self._rate = burst, rate
        self._left, self._counted = burst, now
        self.running = 0

    def holds(self, now: float) -> bool:
        self._left = min(self._burst, self._left + self._rate * (now - self._counted))
        self._counted = now
        return self._left >= 1

    def take(self) -> None:
        self._left = max(0.0, self._left - 1)


class ScraperAdmission:
    """Lets callers through to a handler whom the API server admits."""

    def __init__(self, review: Callable[[str], Awaitable[TokenVerdict]], clock: Callable[[], float]) -> None:
        """`review` raises ApiError where there is no answer; `clock` is in seconds."""
        self._review = review
        self._clock = clock
        self._admitted: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused: OrderedDict[bytes, _Known] = OrderedDict()
        self._again = anyio.Lock()  # one review at a time of tokens that were admitted before
        self._silent_until = -HELD_SECONDS
        # Of tokens that nobody knows.
        self._all = _Bucket(BURST, REVIEWS_PER_SECOND, clock())
        self._of: OrderedDict[str, _Bucket] = OrderedDict()  # by address
        self._welcome: OrderedDict[str, None] = OrderedDict()  # addresses that were admitted
        self._problem: str | None = None
        self._logged: set[str] = set()

    def guarded(self, handler: Handler) -> Handler:
        """The handler, for those alone who are admitted."""

        async def guarded(request: HttpRequest) -> Reply:
            refused = await self._refusal(request.headers.get("Authorization", ""), request.address)
            return refused or await handler(request)

        return guarded

    async def _refusal(self, authorization: str, address: str) -> Reply | None:
        found = _BEARER.fullmatch(authorization.strip())
        if found is None:
            return Reply(b"a bearer token is needed, of an account that may get /metrics\n", 401, CHALLENGE)
        key = hashlib.sha256(found[1].encode()).digest()
        try:
            verdict = await self._verdict(key, found[1], address)
        except ApiError as error:
            return Reply.text(f"the API server does not say whether the token is good: {error}", 503)
        if verdict is None:
            return Reply.text("too many tokens that nobody knows at once; try again", 503)
        if verdict.allowed:
            _newest(self._welcome, address, MOST_ADMITTED, None)
            return None
        self._log(verdict.user)
        if not verdict.user:
            return Reply(b"the API server does not know this token\n", 401, CHALLENGE)
        return Reply.text(f"{verdict.user} may not get {PATH}: bind it to a ClusterRole with that right", 403)

    async def _verdict(self, key: bytes, token: str, address: str) -> TokenVerdict | None:
        """None: too many are asked about. Raises ApiError."""
        if self._fresh(key):
            return self._known(key).verdict
        if key in self._admitted:
            if held := self._held(key, waiting=self._problem is not None and self._again.locked()):
                return held
            async with self._again:
                if self._fresh(key):
                    return self._known(key).verdict
                return self._held(key) or await self._look_again(key, token)
        bucket = self._may_review(address)
        if bucket is None:
            return None
        bucket.running += 1
        self._all.running += 1
        try:
            return self._learn(key, await self._reviewed(token))
        finally:
            bucket.running -= 1
            self._all.running -= 1

    def _held(self, key: bytes, *, waiting: bool = False) -> TokenVerdict | None:
        """The last verdict, while the API server does not answer: an answer would come too late."""
        known, now = self._admitted.get(key), self._clock()
        if known is None or now - known.at >= HELD_SECONDS:
            return None
        return known.verdict if waiting or now < self._silent_until else None

    async def _look_again(self, key: bytes, token: str) -> TokenVerdict:
        try:
            return self._learn(key, await self._reviewed(token))
        except ApiError:
            self._silent_until = self._clock() + SILENT_SECONDS
            if held := self._held(key):
                return held
            raise

    async def _reviewed(self, token: str) -> TokenVerdict:
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

    def _learn(self, key: bytes, verdict: TokenVerdict) -> TokenVerdict:
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

    def _may_review(self, address: str) -> _Bucket | None:
        """The bucket of the address, if a review may be made for it now."""
        now, kept = self._clock(), address in self._welcome
        bucket = self._of.get(address) or _Bucket(OF_ADDRESS_BURST, OF_ADDRESS_PER_SECOND, now)
        _newest(self._of, address, MOST_ADDRESSES, bucket)
        most = MOST_REVIEWS + (KEPT_REVIEWS if kept else 0)
        if self._all.running >= most or not (self._all.holds(now) or kept):
            return None
        if bucket.running >= OF_ADDRESS or not bucket.holds(now):
            return None
        bucket.take()
        self._all.take()
        return bucket

    def _log(self, user: str) -> None:
        if user not in self._logged and len(self._logged) < REMEMBERED_NAMES:
            self._logged.add(user)
            log.warning("scraper_refused", user=user or "a token that the API server does not know")


def _newest(known: OrderedDict[str, T], address: str, most: int, value: T) -> None:
    """Remember an address as the one that was heard of last, and forget the oldest."""
    known[address] = value
    known.move_to_end(address)
    while len(known) > most:
        known.popitem(last=False)
