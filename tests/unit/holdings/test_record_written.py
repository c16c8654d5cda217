"""A kubelet has heard of what it wrote down itself, but maybe not of what it found in its checkpoint."""

from pathlib import Path

import anyio
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


@pytest.mark.parametrize(("known", "complete"), [(False, False), (True, False), (True, True)])
async def test_without_an_api_server_the_kubelet_is_had_to_write_who_holds_what(
    node: Node, known: bool, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod ended while its kubelet was down, and nobody else says so (`cluster.access: off`).

    Nor does the API server of one whose object came and went while the watch was mute.
    """
    clock, written = [0.0], list[float]()
    monkeypatch.setattr(anyio, "current_time", lambda: clock[0])

    async def held_at(*seconds: float) -> set[str]:
        for clock[0] in seconds:
            if len(written) == 2:  # by the first it has not heard of all pods yet, and has freed nothing
                node.kubelet.records(("v", "main", B))
            held = await node.held()
            node.watch._have_it_written()  # as its task does after each reading
        return {name for name, _, _ in held or ()}

    node.complete, node.watch.rewrite = complete, lambda: written.append(clock[0])
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    node.kubelet.pods = {"train-0": {"main": A}, "train-1": {"main": B}} if known else {}
    await held_at(0)
    node.kubelet.restart()
    node.kubelet.pods = {"train-1": {"main": B}}
    if complete:
        node.know("v", "train-1")
    ended = "train-0" if known else "pod with UID u"
    assert await held_at(*range(5, 90, 5)) == {ended, "train-1"}
    assert await held_at(*range(90, 9000, 30)) == {"train-1"}
    first, second = written
    assert 30 <= first < 45
    assert 60 <= second - first <= 90
    # With the API server's word nothing needs to be written.
    written.clear()
    node.kubelet.records(("u", "main", A), ("v", "main", B))
    node.know("u", "train-0")
    node.know("v", "train-1")
    node.complete = True
    assert await held_at(*range(9000, 19000, 30)) == {"train-0", "train-1"}
    assert not written
