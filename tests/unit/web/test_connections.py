"""Which connection goes where there are too many, and how many requests are under way at one time."""

import random
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import pytest

from agent.web.connections import QUIET_SECONDS, Connection, ConnectionLimits, Connections

SMALL = ConnectionLimits(connections=6, connections_per_address=3, requests=4, requests_per_address=2)


class Server:
    """Connections by number, with those that were dropped."""

    def __init__(self, limits: ConnectionLimits = SMALL) -> None:
        self.now = 0.0
        self.connections = Connections(limits, lambda: self.now)
        self.dropped: list[Connection] = []

    def open(self, address: str) -> Connection:
        made = Connection(address, lambda: self.dropped.append(made))
        self.connections.opened(made)
        return made


def test_the_one_of_the_same_address_that_waited_longest_goes() -> None:
    server = Server()
    other = server.open("10.0.0.2")
    first, second, *_ = [server.open("10.0.0.1") for _ in range(3)]
    assert not server.dropped
    server.connections.answered(first)  # it had a request meanwhile: the other one has waited longer by now
    server.open("10.0.0.1")
    assert server.dropped == [second]
    assert len(server.connections) == 4
    assert not other.gone


def test_the_one_that_waited_longest_goes_when_there_are_too_many() -> None:
    server = Server()
    first = server.open("10.0.0.9")
    for number in range(6):
        server.open(f"10.0.0.{number // 2}")
    assert server.dropped == [first]
    assert len(server.connections) == 6


def test_one_with_a_request_under_way_stays() -> None:
    server = Server()
    busy = [server.open("10.0.0.1") for _ in range(2)]
    assert all(server.connections.begins(each) for each in busy)
    waiting = server.open("10.0.0.1")
    server.open("10.0.0.1")
    assert server.dropped == [waiting]


def test_requests_have_places_of_their_own() -> None:
    server = Server()
    callers = [server.open("10.0.0.1") for _ in range(3)] + [server.open("10.0.0.2") for _ in range(3)]
    assert [server.connections.begins(each) for each in callers] == [True, True, False, True, True, False]
    server.connections.answered(callers[0])
    assert server.connections.begins(callers[2])
    server.connections.closed(callers[3])
    assert server.connections.begins(callers[5])


def test_limits_leave_one_that_waits() -> None:
    with pytest.raises(ValueError, match="fewer requests"):
        ConnectionLimits(connections=10, requests=10)
    with pytest.raises(ValueError, match="fewer requests"):
        ConnectionLimits(connections_per_address=8, requests_per_address=8)


def test_a_flood_is_told_once_and_its_end(logs: list[MutableMapping[str, Any]]) -> None:
    server = Server()
    for _ in range(100):
        server.open("10.0.0.1")
    assert [each["event"] for each in logs] == ["http_connections_dropped"]
    server.now += QUIET_SECONDS + 1
    server.open("10.0.0.2")
    assert [(each["event"], each.get("dropped")) for each in logs[1:]] == [("http_connections_fit_again", 97)]


@pytest.mark.parametrize("seed", range(5))
def test_counts_hold_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)
    server = Server()
    there: list[Connection] = []
    for _ in range(3000):
        act = draw.choice(("open", "open", "begin", "answer", "close", "close again", "room"))
        one = draw.choice(there) if there else None
        if act == "open":
            there.append(server.open(f"10.0.0.{draw.randint(1, 4)}"))
        elif act == "room":
            server.connections.make_room()
        elif one is None:
            continue
        elif act == "begin" and not one.busy and not one.gone:
            server.connections.begins(one)
        elif act == "answer":
            server.connections.answered(one)
        elif act.startswith("close"):
            server.connections.closed(one)
        living = [each for each in there if not each.gone]
        assert len(server.connections) == len(living) <= SMALL.connections
        of = Counter(each.address for each in living)
        assert all(count <= SMALL.connections_per_address for count in of.values())
        assert sum(each.busy for each in living) <= SMALL.requests
        there = living + [each for each in there if each.gone][-3:]
    for one in there:
        server.connections.closed(one)
    assert not len(server.connections)
    assert not server.connections.make_room()
