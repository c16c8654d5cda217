"""A pod that has ended stays ended while its entry stands in the checkpoint, and two troubles meet."""

import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

from agent.holdings.record import LAG_SECONDS
from agent.model.cgroup import ContainerRef
from agent.modes.withholding import Departed, Lingering
from tests.unit.holdings.record_node import Node
from tests.unit.holdings.test_record_doubts import A, B

Held = tuple[str, str, str]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def of_a(node: Node) -> "set[Held] | None":
    held = await node.held()
    return None if held is None else {each for each in held if each[2] == A}


async def ended(node: Node) -> None:
    """u, admitted by this kubelet, was deleted, and is listed no more; its entry is still in the file."""
    node.kubelet.pods = {"other": {"main": ""}, "static-node1": {"main": ""}}
    node.know("o", "other")
    node.kubelet.records(("o", "x", B))
    await node.held()  # the first reading of this kubelet
    node.know("u", "trains")
    node.kubelet.pods["trains"] = {"main": A}
    node.kubelet.records(("u", "main", A))
    assert await of_a(node) == {("trains", "main", A)}
    del node.pods["u"]
    del node.kubelet.pods["trains"]
    assert await of_a(node) == set()
    assert await of_a(node) == set()


async def test_ended_though_the_api_server_goes_away(node: Node) -> None:
    await ended(node)
    node.complete = False
    assert await of_a(node) == set()


async def test_ended_though_the_checkpoint_is_torn_beside_a_static_pod_without_a_mirror(node: Node) -> None:
    await ended(node)
    node.kubelet.tear()
    assert await of_a(node) == set()
    node.kubelet.records(("u", "main", A))  # the kubelet frees it with the next list, and names it until then
    node.heard = time.monotonic() + 10 * LAG_SECONDS
    assert await of_a(node) == set()
    node.heard = time.monotonic() + 20 * LAG_SECONDS
    assert await of_a(node) == set()


async def test_ended_though_the_checkpoint_is_torn_and_the_watch_ends(node: Node) -> None:
    await ended(node)
    node.kubelet.pods = {"other": {"main": ""}}
    node.kubelet.tear()
    assert await of_a(node) == set()
    node.kubelet.records(("u", "main", A))
    assert await of_a(node) == set()
    node.complete = False
    assert await of_a(node) == set()


@pytest.mark.parametrize("trouble", ["watch interrupted", "torn, and a static pod has no mirror"])
async def test_a_gpu_with_a_left_process_stays_withheld(tmp_path: Path, trouble: str) -> None:
    node = Node(tmp_path)

    async def processes(gpus: Collection[str]) -> Mapping[str, Collection[int]]:
        return dict.fromkeys(gpus, (7,))

    def owners(pids: Iterable[int]) -> Mapping[int, ContainerRef | None]:
        return {pid: ContainerRef("u", "") for pid in pids}

    watch = node.watch
    departed = Departed(
        lambda: (A,), lambda pids: dict.fromkeys(pids, "u"), watch.known_pods, watch.take_vanished
    )
    lingering = Lingering(watch.gpus_by_pod, processes, owners, watch.holders, departed)
    node.know("o", "other")
    node.kubelet.pods = {"other": {"main": ""}}
    if trouble != "watch interrupted":
        node.kubelet.pods["static-node1"] = {"main": ""}
    node.know("u", "trains")
    node.kubelet.pods["trains"] = {"main": A}
    node.kubelet.records(("u", "main", A))
    assert await node.held()
    await lingering.look()
    assert not lingering.found
    del node.pods["u"]  # by force; its process hangs in the driver
    del node.kubelet.pods["trains"]
    assert await node.held() == set()
    await lingering.look()
    assert A in lingering.found
    if trouble == "watch interrupted":
        node.complete = False
    else:
        node.kubelet.tear()
        await node.held()
        node.kubelet.records(("u", "main", A))
    await node.held()
    await lingering.look()
    assert A in lingering.found, "offered beside process 7 of pod u"
