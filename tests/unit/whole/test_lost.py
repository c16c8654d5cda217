"""Containers whose kubelet lost their GPUs with its checkpoint, and lists their pods without any."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.holdings.record import FILE_NAME
from agent.kubelet.wire import Refused
from agent.model.holding import Holding, Record, Source
from agent.model.pod import (
    Container,
    ContainerRunning,
    ContainerState,
    ContainerStatus,
    Pod,
    PodStatus,
    Stage,
)
from agent.whole.wing import RESOURCE
from tests.pods import a_pod
from tests.unit.holdings.record_node import Node
from tests.unit.whole.test_plugin import Parts


def running(name: str, *, now: bool = True, gpus: int = 1, phase: str = "Running") -> Pod:
    """A pod of one container. `now`: whether that runs by its status."""
    state = ContainerState(ContainerRunning() if now else None)
    statuses = [ContainerStatus("main", f"containerd://{name}", state)]
    pod = a_pod("ns", name, (Container("main", {RESOURCE: gpus}),), name, phase=phase)
    return msgspec.structs.replace(pod, status=PodStatus(phase, container_statuses=statuses))


def lost(*pods: Pod, bare: tuple[str, ...] = (), free: int = 0) -> Parts:
    """Each of `pods` has lost a GPU, in order, and `free` are left; `bare` are listed as well."""
    parts = Parts(len(pods) + free)
    held = tuple(
        Holding("ns", pod.name, "main", RESOURCE, (f"GPU-{n}",), source=Source.FORGOTTEN)
        for n, pod in enumerate(pods)
    )
    names = tuple(("ns", name, "main") for name in (*(pod.name for pod in pods), *bare))
    parts.truth, parts.pods = Record(held, names), list(pods)
    parts.cell.publish(parts.truth)
    return parts


ALL = ("GPU-0", "GPU-1")
PREPARE = Container("prepare", {RESOURCE: 1}, Stage.INIT)
Lost = tuple[Node, Parts]


async def take_in(node: Node, parts: Parts) -> None:
    """A reading, after which the plugin knows what it shows."""
    parts.truth, parts.pods = await node.watch.refresh(), list(node.pods.values())
    parts.cell.publish(parts.truth)


async def without_checkpoint(folder: Path, gpus: int, *early: Container, phase: str = "Running") -> Lost:
    """`train-0` holds GPU-0, and its next kubelet knows nothing of that. `early`: its init containers."""
    node, parts = Node(folder), Parts(gpus)
    node.pods["u"] = a_pod("ns", "train-0", (*early, Container("main", {RESOURCE: 1})), "u", phase=phase)
    node.kubelet.pods = {"train-0": {"main": "GPU-0"}}
    node.kubelet.records(*(("u", each.name, "GPU-0") for each in node.pods["u"].containers))
    await node.held()
    (folder / FILE_NAME).unlink()  # as many do with a kubelet that does not start
    node.kubelet.restart()
    await node.held()
    node.kubelet.pods = {"train-0": {"main": ""}}
    await take_in(node, parts)
    return node, parts


@pytest.mark.parametrize("call", ["prefer", "allocate"])
async def test_it_asks_again_on_a_full_node(tmp_path: Path, call: str) -> None:
    _, parts = await without_checkpoint(tmp_path, 1)
    if call == "prefer":
        assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]
    else:
        assert await parts.allocate("GPU-0") == "GPU-0"


async def test_of_several_the_one_that_does_not_run_asks() -> None:
    parts = lost(running("runs"), running("starts", now=False))
    assert await parts.prefer(ALL, 1) == ["GPU-1"]
    assert await parts.allocate("GPU-1") == "GPU-1"
    await parts.refusal("GPU-0")


@pytest.mark.parametrize("phase", ["Pending", "Running"])
async def test_what_a_pod_runs_on_is_not_had_by_another_that_lost_as_much(phase: str) -> None:
    """Of a pod that waits its init container runs; of one that runs, its heir. The other's status is old."""
    early = phase == "Pending"
    state, none = ContainerState(ContainerRunning()), ContainerState()
    status = PodStatus(
        phase,
        container_statuses=[ContainerStatus("main", "", none if early else state)],
        init_container_statuses=[ContainerStatus("prepare", "", state if early else none)],
    )
    first = msgspec.structs.replace(
        a_pod("ns", "first", (PREPARE, Container("main", {RESOURCE: 1}))), status=status
    )
    parts = lost(first, running("other", now=not early))
    assert parts.truth
    prepare = Holding("ns", "first", "prepare", RESOURCE, ("GPU-0",), source=Source.FORGOTTEN)
    parts.truth = Record((*parts.truth.holdings, prepare), parts.truth.containers)
    parts.cell.publish(parts.truth)
    await parts.refusal("GPU-0")
    if early:
        assert await parts.prefer(ALL, 1) == ["GPU-1"]
    else:
        with pytest.raises(Refused):
            await parts.prefer(ALL, 1)


async def test_an_init_container_that_runs_keeps_what_it_lost_though_its_heir_has_another(
    tmp_path: Path,
) -> None:
    node, parts = await without_checkpoint(tmp_path, 2, PREPARE, phase="Pending")
    node.kubelet.pods = {"train-0": {"main": "GPU-1"}}
    node.kubelet.records(("u", "main", "GPU-1"))
    for _ in range(2):
        await take_in(node, parts)
        assert {each.ids for each in parts.held} == {("GPU-0",), ("GPU-1",)}


@pytest.mark.parametrize("others", [(), (("x", "main", "GPU-3"),)])
async def test_a_torn_file_is_lost_by_the_next_kubelet(tmp_path: Path, others: tuple[Any, ...]) -> None:
    """It lists the pod before it writes the file."""
    node = Node(tmp_path)
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": "GPU-0"}}
    node.kubelet.records(("u", "main", "GPU-0"))
    held = await node.held()
    assert held
    node.kubelet.tear()
    node.kubelet.restart()
    assert await node.held() == held
    node.kubelet.pods = {"train-0": {"main": ""}}
    assert await node.held() == held
    node.kubelet.records(*others)
    for _ in range(2):
        assert held <= (await node.held() or set())


async def test_of_two_that_start_each_may_have_the_others() -> None:
    parts = lost(running("one", now=False), running("other", now=False))
    assert await parts.allocate("GPU-1") == "GPU-1"
    assert parts.truth
    # The kubelet lists the first with it: GPU-0 is free, and the second has only that.
    again = Holding("ns", "one", "main", RESOURCE, ("GPU-1",))
    parts.truth = Record((again, parts.truth.holdings[1]), parts.truth.containers)
    parts.cell.publish(parts.truth)
    await parts.refusal("GPU-1")
    assert await parts.prefer(ALL, 1) == ["GPU-0"]


async def test_a_gpu_that_is_free_comes_first() -> None:
    parts = lost(running("starts", now=False), free=1)
    assert await parts.prefer(ALL, 1) == ["GPU-1"]
    with pytest.raises(Refused):  # two are asked for by somebody else
        await parts.prefer(ALL, 2)


@pytest.mark.parametrize(
    "stranger",
    [
        running("new", now=False, phase="Pending"),
        a_pod("ns", "new", (Container("prepare", {RESOURCE: 1}, Stage.INIT),), phase="Pending"),
        None,  # a static pod before its mirror
    ],
)
async def test_a_stranger_is_given_nothing_that_was_lost(stranger: Pod | None) -> None:
    parts = lost(running("starts", now=False), bare=("new",))
    parts.pods += [stranger] if stranger else []
    with pytest.raises(Refused):
        await parts.prefer(("GPU-0",), 1)
    await parts.refusal("GPU-0")


async def test_who_asks_for_none_or_is_over_keeps_nobody_from_it() -> None:
    others = [running("idle", gpus=0), running("done", phase="Succeeded")]
    parts = lost(running("starts", now=False), bare=("idle", "done"))
    parts.pods += others
    assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]


async def test_a_later_container_of_the_pod_is_no_reason_to_give_it_to_a_stranger() -> None:
    parts = lost(running("runs"), bare=("stranger",))
    assert parts.truth
    parts.truth = Record(parts.truth.holdings, (*parts.truth.containers, ("ns", "runs", "helper")))
    parts.cell.publish(parts.truth)
    await parts.refusal("GPU-0")


@pytest.mark.parametrize(("gpus", "phase"), [(2, "Running"), (2, "Pending"), (1, "Pending")])
async def test_an_init_container_that_is_served_again_hands_on_what_it_has(
    tmp_path: Path, gpus: int, phase: str
) -> None:
    node, parts = await without_checkpoint(tmp_path, gpus, PREPARE, phase=phase)
    gpu = f"GPU-{gpus - 1}"
    assert await parts.prefer(ALL[:gpus], 1) == [gpu]
    assert await parts.allocate(gpu) == gpu
    node.kubelet.records(("u", "prepare", gpu))
    await take_in(node, parts)
    assert await parts.allocate(gpu) == gpu  # unasked, for the container that runs


async def test_what_an_init_container_lost_is_free_once_its_heir_has_another(tmp_path: Path) -> None:
    node, parts = await without_checkpoint(tmp_path, 2, PREPARE)
    assert await parts.allocate("GPU-1") == "GPU-1"
    node.kubelet.pods = {"train-0": {"main": "GPU-1"}, "train-1": {"main": ""}}
    node.kubelet.records(("u", "main", "GPU-1"))
    node.know("v", "train-1")
    await take_in(node, parts)
    assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]


async def test_a_helper_beside_gives_a_stranger_nothing_that_an_init_container_lost(tmp_path: Path) -> None:
    """It was handed on, and its heir runs."""
    node, parts = await without_checkpoint(tmp_path, 1, PREPARE)
    node.know("v", "train-1")
    node.kubelet.pods = {"train-0": {"main": "", "proxy": ""}, "train-1": {"main": ""}}
    await take_in(node, parts)
    await parts.refusal("GPU-0")


async def test_a_kubelet_that_starts_asks_for_init_containers_that_are_over() -> None:
    """Of pods that run, whose other containers it passes over."""
    both = (PREPARE, Container("main", {RESOURCE: 2}))
    parts = lost(running("runs", gpus=2))
    parts.pods = [msgspec.structs.replace(a_pod("ns", "runs", both), status=parts.pods[0].status)]
    held = [
        Holding("ns", "runs", name, RESOURCE, ids, source=Source.FORGOTTEN)
        for name, ids in (("main", ("GPU-0", "GPU-1")), ("prepare", ("GPU-0",)))
    ]
    parts.truth = Record(tuple(held), (("ns", "runs", "main"),))
    parts.cell.publish(parts.truth)
    assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]


async def test_a_file_that_is_deleted_under_a_kubelet_is_lost_by_the_next_one(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": "GPU-0"}}
    node.kubelet.records(("u", "main", "GPU-0"))
    held = await node.held()
    (tmp_path / FILE_NAME).unlink()
    assert await node.held() == held == {("train-0", "main", "GPU-0")}
    node.kubelet.restart()
    assert await node.held() == held
    node.kubelet.pods = {"train-0": {"main": ""}}
    assert await node.held() == held


async def test_a_uid_that_others_claim_keeps_nothing_that_the_kubelet_has_freed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.know("u", "train-0", hides=True)
    node.kubelet.pods = {"train-0": {"main": "GPU-1"}}
    node.kubelet.records(("u", "prepare", "GPU-0"), ("u", "main", "GPU-1"))
    await node.held()
    del node.pods["u"]
    node.contested = frozenset({"u"})
    await node.held()
    node.kubelet.pods = {"x": {"main": ""}}
    node.kubelet.records(("x", "main", "GPU-7"))
    assert {each[0] for each in await node.held() or ()} == {"pod with UID x"}
