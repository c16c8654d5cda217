"""Who is admitted to the metrics, for how long, and what a flood of tokens costs the API server."""

from typing import Any

import anyio
import pytest

from agent.cluster.api import ApiUnavailable
from agent.cluster.reviews import TokenVerdict
from agent.telemetry import access
from agent.telemetry.access import FRESH_SECONDS, HELD_SECONDS, REFUSED_SECONDS, ScraperAdmission
from agent.web.server import HttpRequest, Reply

SCRAPER = "system:serviceaccount:monitoring:prometheus"


class Door:
    """A guarded page, and the API server that says who may have it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.known = {
            "good": TokenVerdict(SCRAPER, allowed=True),
            "other": TokenVerdict("somebody", allowed=False),
        }
        self.away = False
        self.asked: list[str] = []
        self.slow: anyio.Event | None = None
        self.admission = ScraperAdmission(self._review, lambda: self.now)
        self._page = self.admission.guarded(self._shown)

    async def _review(self, token: str) -> TokenVerdict:
        self.asked.append(token)
        if self.slow:
            await self.slow.wait()
        if self.away:
            raise ApiUnavailable("the API server cannot be reached")
        return self.known.get(token, TokenVerdict())

    async def _shown(self, _: HttpRequest) -> Reply:
        return Reply.text("figures")

    async def get(self, token: str, address: str = "10.0.0.1") -> int:
        """Status of a scrape with a token."""
        return (await self.reply(f"Bearer {token}", address)).status

    async def reply(self, authorization: str, address: str = "10.0.0.1") -> Reply:
        headers = {"Authorization": authorization}
        return await self._page(HttpRequest("/metrics", headers=headers, address=address))


async def test_the_api_server_says_who_is_admitted_and_is_asked_once_a_minute(logs: list[Any]) -> None:
    door = Door()
    assert [await door.get(token) for token in ("good", "other", "unknown")] == [200, 403, 401]
    for _ in range(5):
        assert [await door.get(token) for token in ("good", "other", "unknown")] == [200, 403, 401]
    assert door.asked == ["good", "other", "unknown"]
    door.now = FRESH_SECONDS - 1
    assert await door.get("good") == 200
    assert door.asked.count("good") == 1
    door.now = FRESH_SECONDS
    assert await door.get("good") == 200
    assert door.asked.count("good") == 2
    refused = [each["user"] for each in logs if each["event"] == "scraper_refused"]
    assert refused == ["somebody", "a token that the API server does not know"]  # each once


async def test_a_right_that_is_taken_away_counts_after_a_minute_and_one_that_is_given_sooner() -> None:
    door = Door()
    assert [await door.get("good"), await door.get("other")] == [200, 403]
    door.known = {"other": TokenVerdict("somebody", allowed=True)}
    door.now = REFUSED_SECONDS
    assert [await door.get("good"), await door.get("other")] == [200, 200]
    door.now = FRESH_SECONDS
    assert await door.get("good") == 401


async def test_the_last_verdict_holds_for_some_minutes_without_the_api_server(logs: list[Any]) -> None:
    door = Door()
    assert await door.get("good") == 200
    door.away = True
    assert [await door.get("new"), await door.get("other")] == [503, 503]
    door.now = FRESH_SECONDS
    assert await door.get("good") == 200
    door.now = HELD_SECONDS - 1
    assert await door.get("good") == 200
    door.now = HELD_SECONDS
    assert await door.get("good") == 503
    door.away = False
    assert await door.get("good") == 200
    events = [each["event"] for each in logs if each["event"].startswith("scrapers_")]
    assert events == ["scrapers_not_reviewed", "scrapers_reviewed"]


@pytest.mark.parametrize(
    "authorization",
    [
        *(
            "",
            "good",
            "Basic good",
            "Bearer",
            "Bearer ",
            "Bearer good good",
            "Bearer g\u00f6\u00f6d",
            "Bearer a,b",
        ),
        *("Bearer " + "x" * 9000, "Bearer\tgood", "Digest Bearer good", "Bearer good\nBearer good"),
    ],
)
async def test_what_is_no_token_is_not_reviewed(authorization: str) -> None:
    door = Door()
    reply = await door.reply(authorization)
    assert (reply.status, door.asked) == (401, [])
    assert reply.headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_flood_of_tokens_neither_floods_the_api_server_nor_shuts_out_a_scraper() -> None:
    door = Door()
    assert await door.get("good") == 200
    found = [await door.get(f"forged{number}") for number in range(2000)]
    assert len(door.asked) <= 1 + access.BURST
    assert set(found) == {401, 503}
    door.now = FRESH_SECONDS + 1
    assert await door.get("good") == 200
    for second in range(100):
        door.now += 1
        for number in range(20):
            await door.get(f"again{second}.{number}")
        assert await door.get("good") == 200
    assert len(door.asked) <= 2 * access.BURST + 100 * access.REVIEWS_PER_SECOND + 10


async def test_reviews_at_one_time_are_few_and_scrapers_of_one_token_ask_once() -> None:
    door = Door()
    assert await door.get("good") == 200
    door.now, door.slow = FRESH_SECONDS, anyio.Event()
    found: list[int] = []

    async def scrape(token: str, address: str = "10.0.0.1") -> None:
        found.append(await door.get(token, address))

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(scrape, f"forged{number}", f"10.0.1.{number}")
        for _ in range(3):
            group.start_soon(scrape, "good")
        await anyio.wait_all_tasks_blocked()
        assert found == [503] * (10 - access.MOST_REVIEWS)
        door.slow.set()
    assert sorted(found) == [200] * 3 + [401] * access.MOST_REVIEWS + [503] * (10 - access.MOST_REVIEWS)
    assert door.asked.count("good") == 2
    door.slow = None
    assert await door.get("forged-later") == 401  # a review that is over makes room


async def test_a_scraper_that_nobody_knows_yet_is_let_in_beside_a_flood() -> None:
    """After a restart of the agent no token is known."""
    door = Door()
    for number in range(200):
        await door.get(f"forged{number}", "10.0.0.66")
    assert await door.get("good") == 200
    assert len(door.asked) <= 1 + access.OF_ADDRESS_BURST


async def test_a_renewed_token_of_an_address_that_was_admitted_passes_a_flood_of_many_addresses() -> None:
    door = Door()
    assert await door.get("good") == 200
    door.known["renewed"] = TokenVerdict(SCRAPER, allowed=True)
    for number in range(1000):
        await door.get(f"forged{number}", f"10.0.{number % 250}.66")
    assert await door.get("other", "10.1.1.1") == 503
    assert await door.get("renewed") == 200
    assert len(door.asked) <= 2 + access.BURST
    # Nor do reviews that do not end keep it waiting.
    slow = anyio.Event()
    door.now, door.slow = 20.0, slow
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(door.get, f"slow{number}", f"10.2.0.{number}")
        await anyio.wait_all_tasks_blocked()
        door.slow = None
        door.known["again"] = TokenVerdict(SCRAPER, allowed=True)
        assert await door.get("again") == 200
        slow.set()


async def test_addresses_that_are_remembered_have_a_bound() -> None:
    door = Door()
    for number in range(2 * access.MOST_ADDRESSES):
        door.now += 1
        await door.get(f"forged{number}", f"10.3.{number // 250}.{number % 250}")
    assert len(door.admission._of) == access.MOST_ADDRESSES


async def test_held_verdicts_are_answered_at_once_while_the_api_server_hangs() -> None:
    door = Door()
    assert await door.get("good") == 200
    door.now, door.away, door.slow = FRESH_SECONDS, True, anyio.Event()
    found: list[int] = []

    async def scrape() -> None:
        found.append(await door.get("good"))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(scrape)
        await anyio.wait_all_tasks_blocked()
        door.slow.set()  # the first review is over, without an answer
    assert found == [200] * 4
    assert door.asked.count("good") == 2
    door.slow = anyio.Event()
    assert await door.get("good") == 200
    door.now += access.SILENT_SECONDS
    async with anyio.create_task_group() as group:
        group.start_soon(scrape)
        await anyio.wait_all_tasks_blocked()
        assert await door.get("good") == 200  # while the other one waits
        door.slow.set()
    assert door.asked.count("good") == 3
