"""Containers whose kubelet lost their GPUs with its checkpoint, and lists their pods without any."""

from pathlib import Path

import msgspec
import pytest

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


@pytest.mark.parametrize("call", ["prefer", "allocate"])
async def test_it_asks_again_on_a_full_node(tmp_path: Path, call: str) -> None:
    node, parts = Node(tmp_path), Parts(1)
    node.know("u", "train-0")
    node.kubelet.pods = {"train-0": {"main": "GPU-0"}}
    node.kubelet.records(("u", "main", "GPU-0"))
    await node.held()
    (tmp_path / "kubelet_internal_checkpoint").unlink()  # as many do with a kubelet that does not start
    node.kubelet.restart()
    await node.held()
    node.kubelet.pods = {"train-0": {"main": ""}}
    parts.truth, parts.pods = await node.watch.refresh(), list(node.pods.values())
    parts.cell.publish(parts.truth)
    if call == "prefer":
        assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]
    else:
        assert await parts.allocate("GPU-0") == "GPU-0"


async def test_of_several_the_one_that_does_not_run_asks() -> None:
    parts = lost(running("runs"), running("starts", now=False))
    assert await parts.prefer(ALL, 1) == ["GPU-1"]
    assert await parts.allocate("GPU-1") == "GPU-1"
    await parts.refusal("GPU-0")


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
