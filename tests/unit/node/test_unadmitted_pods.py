"""Who is bound here and has no devices yet."""

from collections.abc import Mapping
from typing import Any

import msgspec

from agent.model.holding import Holding, Record
from agent.model.pod import ContainerSpec, Metadata, Pod, PodSpec, PodStatus, Requirements
from agent.node.withdrawal import unadmitted

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"


def pod(name: str, *resources: str, phase: str = "Pending", deleted: str | None = None) -> Pod:
    container = ContainerSpec("main", Requirements(dict.fromkeys(resources, "1")))
    metadata = Metadata(name=name, namespace="default", uid=f"u-{name}", deletion_timestamp=deleted)
    return Pod(metadata, PodSpec([container]), PodStatus(phase))


class Node:
    """The views of API server and kubelet."""

    def __init__(self, *pods: Pod) -> None:
        self.pods = {each.metadata.uid: each for each in pods}
        self.held: list[tuple[str, str]] | None = []  # pod, resource; None: no answer
        self.reads = 0
        self.late: Pod | None = None  # bound while the kubelet is asked

    def known(self) -> Mapping[str, Pod]:
        return self.pods

    async def refresh(self) -> Record | None:
        self.reads += 1
        if self.late:
            self.pods[self.late.metadata.uid] = self.late
        if self.held is None:
            return None
        return Record(tuple(Holding("default", name, "main", kind, ("x",)) for name, kind in self.held), ())

    async def unadmitted(self) -> frozenset[str]:
        return await unadmitted(self.known, lambda: {CORE, MEMORY}, self.refresh)


async def test_half_a_pair_is_not_enough() -> None:
    node = Node(pod("none", CORE, MEMORY), pod("half", CORE, MEMORY), pod("both", CORE, MEMORY))
    node.held = [("half", CORE), ("both", CORE), ("both", MEMORY)]
    assert await node.unadmitted() == {"u-none", "u-half"}


async def test_only_pods_that_wait_for_ours_are_asked_about() -> None:
    node = Node(
        pod("runs", CORE, phase="Running"),
        pod("ends", CORE, deleted="2026-01-01T00:00:00Z"),
        pod("failed", CORE, phase="Failed"),
        pod("other", "cpu"),
    )
    assert await node.unadmitted() == set()
    assert node.reads == 0


async def test_a_kubelet_that_does_not_answer_has_not_served_them() -> None:
    node = Node(pod("waits", CORE), pod("other", "cpu"))
    node.held = None
    assert await node.unadmitted() == {"u-waits"}


async def test_a_pod_that_was_bound_meanwhile_counts() -> None:
    node = Node(pod("served", CORE))
    node.held, node.late = [("served", CORE)], pod("late", CORE)
    assert await node.unadmitted() == {"u-late"}


async def test_limit_of_zero_waits_for_nothing() -> None:
    zero = Pod(
        Metadata("zero", "default", "u-zero"),
        PodSpec([ContainerSpec("main", Requirements({CORE: "0", MEMORY: "0k", "cpu": "1"}))]),
        PodStatus("Pending"),
    )
    node = Node(zero)
    assert await node.unadmitted() == set()
    assert node.reads == 0
    assert not zero.devices
    # Beside one that it waits for it is no second one.
    both = msgspec.structs.replace(
        zero, spec=PodSpec([ContainerSpec("main", Requirements({CORE: "1", MEMORY: "0"}))])
    )
    node = Node(both)
    assert await node.unadmitted() == {"u-zero"}
    node.held = [("zero", CORE)]
    assert await node.unadmitted() == set()


async def test_what_comes_by_dra_is_waited_for_by_nobody() -> None:
    text: Any = {
        "metadata": {"name": "dra", "namespace": "default", "uid": "u-dra"},
        "spec": {
            "containers": [
                {"name": "main", "resources": {"limits": {CORE: "1"}}},
                {"name": "other", "resources": {"limits": {MEMORY: "1"}}},
            ]
        },
        "status": {
            "phase": "Pending",
            "extendedResourceClaimStatus": {
                "resourceClaimName": "dra-extended-resources-x",
                "requestMappings": [
                    {"containerName": "main", "resourceName": CORE, "requestName": "container-0-request-0"}
                ],
            },
        },
    }
    waits = msgspec.convert(text, Pod)
    node = Node(waits)
    assert await node.unadmitted() == {"u-dra"}  # for what the other container lacks
    assert [each.limits for each in waits.containers] == [{}, {MEMORY: 1}]
    del text["spec"]["containers"][1]
    node = Node(msgspec.convert(text, Pod))
    assert await node.unadmitted() == set()
    assert node.reads == 0
