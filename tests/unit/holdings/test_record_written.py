"""A kubelet has heard of what it wrote down itself, but maybe not of what it found in its checkpoint."""

from pathlib import Path

import pytest

from tests.unit.holdings.record_node import Node

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("torn", [False, True])
async def test_a_pod_that_ends_between_two_readings_ends_without_the_api_servers_word(
    node: Node, torn: bool
) -> None:
    """Its kubelet has written it down itself, so that it has heard of it, though no reading has shown it."""
    node.know("u", "train-0")
    node.kubelet.restart()
    node.kubelet.records(("u", "main", A))
    if torn:  # what this kubelet found in its checkpoint is not known
        node.kubelet.tear()
        await node.held()
    else:
        assert await node.held() == {("train-0", "main", A)}
    node.know("v", "train-1")
    node.complete = False  # and the watch, which has shown the pod, does not show its end
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    for _ in range(2):
        held = await node.held()
    assert held == {("train-0", "main", A)} | ({("train-1", "main", B)} if torn else set())
    node.kubelet.records(("u", "main", A))
    held = await node.held()
    assert held == {("train-0", "main", A)} | ({("train-1", "main", B)} if torn else set())
