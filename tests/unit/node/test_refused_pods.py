"""Events on pods that the kubelet refused."""

from typing import Any

import anyio
import pytest

from agent.cluster.event_recorder import Event
from agent.kit.tasks import Cell
from agent.model.pod import ContainerSpec, Metadata, OwnerReference, Pod, PodSpec, PodStatus, Requirements
from agent.node import refused_pods


def pod(reason: str, resource: str = "nvidia.com/gpu", phase: str = "Failed", **more: Any) -> Pod:
    spec = PodSpec([ContainerSpec("main", Requirements({resource: "1"}))])
    return Pod(Metadata("p", "team", "uid-1", **more), spec, PodStatus(phase, reason, "no GPU\n is free"))


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (pod("UnexpectedAdmissionError"), True),
        (pod("OutOfnvidia.com/gpu"), True),
        (pod("OutOfcpu"), False),
        (pod("Evicted"), False),
        (pod("UnexpectedAdmissionError", "example.com/other"), False),
        (pod("UnexpectedAdmissionError", phase="Pending"), False),
    ],
)
def test_which_pods_are_meant(found: Pod, refused: bool) -> None:
    assert refused_pods.is_refused(found) is refused


async def test_each_gets_one_event_with_the_remedy() -> None:
    pods: Cell[Any] = Cell({"uid-1": pod("", phase="Pending")})
    recorder: Any = Recorder()
    async with anyio.create_task_group() as group:
        group.start_soon(refused_pods.follow, pods, recorder)
        await anyio.wait_all_tasks_blocked()
        assert recorder.events == []
        for _ in range(2):
            pods.publish({"uid-1": pod("UnexpectedAdmissionError")})
            await anyio.wait_all_tasks_blocked()
        (event,) = recorder.events
        group.cancel_scope.cancel()
    assert (event.reason, event.key, event.regarding.uid) == ("AllocationRefused", "refused", "uid-1")
    assert event.message == (
        "UnexpectedAdmissionError: no GPU is free; the pod stays Failed: delete it and create it again"
    )
    owned = pod("OutOfnvidia.com/gpu", owner_references=[OwnerReference("v1", "ReplicaSet", "web")])
    assert refused_pods.event_of(owned).message.endswith("its ReplicaSet web creates another one")
