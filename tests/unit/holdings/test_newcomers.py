"""Which listed pods the kubelet may be admitting: it takes up one after the other."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.holdings.record import Evidence, View, join
from agent.model.holding import Record
from tests.unit.holdings.record_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def newcomers(node: Node, *listed: str) -> set[str]:
    """The names of the newcomers, with these pods listed."""
    node.kubelet.pods = {each: {"main": ""} for each in listed}
    return {name for _, name in (await node.watch.look()).newcomers}


async def test_who_was_listed_before_others_is_admitted_by_now(node: Node) -> None:
    assert await newcomers(node, "a", "b") == {"a", "b"}
    assert await newcomers(node, "a", "b") == {"a", "b"}  # no age says that it is through
    assert await newcomers(node, "a", "b", "c") == {"c"}
    assert await newcomers(node, "b") == set()
    node.know("uid-b", "b")  # the API server's word is no list
    assert await newcomers(node, "b", "a") == {"a"}


async def test_next_kubelet_admits_all_again(node: Node) -> None:
    await newcomers(node, "a")
    assert await newcomers(node, "a", "b") == {"b"}
    node.kubelet.restart()
    assert await newcomers(node, "a", "b") == {"a", "b"}


def test_reading_that_is_older_than_the_one_before_says_nothing() -> None:
    both = Record((), (("ns", "a", "main"), ("ns", "b", "main")), began=2.0)
    newer = join(Evidence(), both, {}, View(), same_kubelet=False, fresh=True)
    older = join(newer, replace(both, began=1.0), {}, View(), same_kubelet=True, fresh=True)
    assert older.joined.newcomers == both.pods
