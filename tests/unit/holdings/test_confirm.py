"""Holders that ended while their kubelet was away: it offers their units, and the API server is asked."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import pytest

from agent.holdings.record import PodKey, View
from tests.unit.holdings.record_node import Node

A = "GPU-00000000-0000-0000-0000-00000000000a"


class Asked(Node):
    """With an API server that answers for single pods, beside its watch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.over: set[str] = set()
        self.answers: set[str] = set()  # UIDs that are over by its word
        self.questions: list[Mapping[str, PodKey]] = []
        self.watch.view = lambda: View(
            {uid: pod for uid, pod in self.pods.items() if uid not in self.over},
            self.complete,
            over=frozenset(self.over),
        )
        self.watch.ask_after = self._ask_after

    async def _ask_after(self, pods: Mapping[str, PodKey], listed: Collection[PodKey]) -> None:
        self.questions.append(pods)
        self.over |= {uid for uid in pods.keys() & self.answers if pods[uid] not in listed}

    async def confirmed(self) -> set[str]:
        """The pods that hold anything when all holders of a reading were asked after."""
        record = await self.watch.confirm((await self.watch.look()).holdings)
        return {each.pod for each in record.holdings}


@pytest.fixture
def node(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


@pytest.mark.parametrize("watch", ["interrupted", "mute", "never showed it"])
async def test_a_holder_that_ended_while_its_kubelet_was_away_holds_nothing_once_it_was_asked_after(
    node: Asked, watch: Literal["interrupted", "mute", "never showed it"]
) -> None:
    if watch != "never showed it":
        node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A))
    assert await node.held() == {("train-0", "main", A)}
    # It ends, and the kubelet that is there by now lists it no more; its checkpoint is not written again yet.
    node.complete = watch == "mute"
    node.kubelet.restart()
    assert await node.held() == {("train-0", "main", A)}
    assert await node.confirmed() == {"train-0"}  # the API server does not answer, or it lives
    node.answers = {"u"}
    assert await node.confirmed() == set()
    assert node.watch.cell.value is not None
    assert node.watch.cell.value.holdings == ()
    # It stays so, though the checkpoint names it, and the watch shows it still.
    node.complete = True
    assert await node.held() == set()
    node.kubelet.restart()
    assert await node.held() == set()
    assert node.questions == [{"u": ("ns", "train-0")}] * 2


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("watch", ["mute", "never showed it"])
async def test_who_is_listed_is_not_asked_after(
    node: Asked, watch: Literal["mute", "never showed it"], *, prepares: bool
) -> None:
    """A kubelet that lists a pod, as one that has not heard of a deletion by force, runs it.

    Though no list shows what its init container holds.
    """
    if watch == "mute":
        node.know("u", "train-0", hides=prepares)
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A), *[("u", "prepare", A)] * prepares)
    held = await node.held()
    node.answers = {"u"}
    assert await node.confirmed() == {"train-0"}
    assert await node.watch.confirm_names({("ns", "train-0")}) is None
    assert node.questions == []
    assert node.watch.gpus_by_pod() == {"u": {A}}
    assert await node.held() == held


async def test_a_listed_pod_whose_object_is_gone_keeps_what_no_list_shows(node: Asked) -> None:
    """Deleted by force before this agent began: its init container, which alone has devices, runs."""
    node.kubelet.pods = {"web-0": {"main": ""}, "train-0": {"main": A}}
    node.kubelet.records(("t", "main", A), ("u", "prepare", A[:-1] + "b"))
    node.know("u", "web-0")
    await node.held()
    del node.pods["u"]
    node.complete = False
    node.answers = {"u"}
    assert await node.watch.confirm_names({("ns", "web-0")}) is not None
    assert node.questions == [{"u": ("ns", "web-0")}]
    assert node.watch.gpus_by_pod().keys() == {"t", "u"}
    # As when the kubelet offers its devices for another.
    assert await node.confirmed() == {"train-0", "web-0"}
    assert len(node.questions) == 2
    assert node.watch.gpus_by_pod().keys() == {"t", "u"}
    del node.kubelet.pods["web-0"]
    assert await node.confirmed() == {"train-0"}


async def test_a_pod_that_is_listed_while_it_is_asked_after_goes_on(node: Asked) -> None:
    """It was deleted by force, and its kubelet, which had just started, had not heard of it yet."""
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": A}}
    node.kubelet.records(("u", "main", A))
    await node.held()
    node.complete = False
    node.kubelet.restart()
    await node.held()

    async def answer(pods: Mapping[str, PodKey], _: Collection[PodKey]) -> None:
        node.kubelet.pods = {"train-0": {"main": A}}
        await node.watch.look()
        node.over |= pods.keys()

    node.watch.ask_after = answer
    assert await node.confirmed() == {"train-0"}
    assert node.watch.gpus_by_pod() == {"u": {A}}
    assert await node.held() == {("train-0", "main", A)}
    node.kubelet.pods = {}
    assert await node.held() == set()
