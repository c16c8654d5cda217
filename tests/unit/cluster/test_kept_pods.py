"""As much of the node's pods as is kept: a tenant's finished ones stay, and annotations are large."""

import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from agent.cluster.pods import HASH_ANNOTATION, LONGEST, LONGEST_RESIZE, READ, PodCache, cgroup_uids, kept
from agent.model.placement import ASSIGNED, BURST, HINT, HINT_NODE, POLICY, PRIORITY, RESIZE
from agent.model.pod import VGPU, Pod
from agent.node import refused_pods
from agent.vgpu.resize import LONGEST_TEXT
from tests.virtual_time import in_virtual_time

LARGE = 100 << 10
OWNERS = [
    {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j"},
    *[{"apiVersion": "v1", "kind": "ConfigMap", "name": f"c{number}"} for number in range(5)],
    {"apiVersion": "v1", "kind": "Node", "name": "node", "uid": "n", "controller": True},
]


def document(name: str, phase: str = "Running", **traits: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "7"}
    limits = {VGPU.core: "20", VGPU.memory: "4", "example.com/other": "1"}
    main = {
        "name": "main",
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    }
    container = {"name": "main", "containerID": "containerd://abc", "state": {"running": {}}}
    status = {"phase": phase, "containerStatuses": [container]}
    spec = {"nodeName": "node", "containers": [main], "volumes": [{"name": "v"}]}
    return {
        "metadata": metadata | traits.get("metadata", {}),
        "spec": spec,
        "status": status | traits.get("status", {}),
    }


def decoded(found: dict[str, Any]) -> Pod:
    return msgspec.json.decode(json.dumps(found), type=Pod)


class Server:
    """Streams a list of pods, and then nothing."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines

    @asynccontextmanager
    async def stream(self, *_: object) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            for each in self._lines:
                yield each
            await anyio.sleep_forever()

        yield lines()


def test_finished_pods_take_little_memory_whatever_they_carry() -> None:
    annotations = {"example.com/notes": "x" * LARGE, f"{HINT}0": "y" * LARGE, POLICY: "z" * LARGE}
    pod = document("NAME", "Succeeded", metadata={"annotations": annotations, "labels": {"l": "v" * 60}})
    template = json.dumps({"type": "ADDED", "object": pod})
    marked = {"annotations": {"k8s.io/initial-events-end": "true"}, "resourceVersion": "9"}

    def listed() -> Iterator[bytes]:
        for number in range(2000):
            yield template.replace("NAME", f"pod-{number:05}").encode()
        yield json.dumps({"type": "BOOKMARK", "object": {"metadata": marked}}).encode()

    @in_virtual_time
    async def run() -> None:
        cache = PodCache(Server(listed()), "node")  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(cache.reflector.run)
                await anyio.sleep(1)
                assert len(cache.pods()) == len(cache.uids()) == 2000
                assert tracemalloc.get_traced_memory()[0] < 5 << 20
                group.cancel_scope.cancel()
        finally:
            tracemalloc.stop()

    run()


def test_every_annotation_that_is_read_of_a_pod_is_kept_and_no_other() -> None:
    read = {HASH_ANNOTATION, ASSIGNED, HINT_NODE, POLICY, BURST, PRIORITY, RESIZE}
    assert read == READ
    names = {*read, f"{HINT}0"}
    annotations = dict.fromkeys({*names, f"{HINT}1", f"{HINT}00", "example.com/notes"}, "v" * LARGE)
    metadata = {"annotations": annotations, "labels": {"a": "b"}, "ownerReferences": OWNERS}
    pod = decoded(document("a", metadata=metadata))
    found = kept(pod)
    assert {name: len(text) for name, text in found.annotations.items()} == {
        name: LONGEST_RESIZE if name == RESIZE else LONGEST for name in names
    }
    assert LONGEST_RESIZE > LONGEST_TEXT  # it stays too long for its reader
    assert not found.metadata.labels
    assert [each.kind for each in found.metadata.owner_references] == ["Job", "Node"]
    assert (found.spec, found.status, found.key) == (pod.spec, pod.status, ("team", "a"))


def test_a_finished_pod_stays_known_by_all_its_names() -> None:
    metadata = {"annotations": {HASH_ANNOTATION: "static", POLICY: "spread"}, "ownerReferences": OWNERS}
    found = kept(decoded(document("a", "Succeeded", metadata=metadata)))
    assert (found.finished, found.key, found.uid) == (True, ("team", "a"), "a")
    assert found.metadata.resource_version == "7"
    assert found.container_names == {"abc": "main"}
    assert cgroup_uids({"a": found}, "node", "n").pods.keys() == {"a", "static"}
    assert not found.spec.containers
    huge = [{"kind": "Job", "name": "x" * LARGE}, OWNERS[-1]]
    (owner,) = kept(
        decoded(document("a", "Failed", metadata={"ownerReferences": huge}))
    ).metadata.owner_references
    assert owner.kind == "Node"


def test_the_event_of_a_refused_pod_stays_the_same() -> None:
    said = {"reason": "UnexpectedAdmissionError", "message": "no GPU is free", "containerStatuses": []}
    pod = decoded(document("a", "Failed", metadata={"ownerReferences": OWNERS}, status=said))
    found = kept(pod)
    assert refused_pods.is_refused(pod)
    assert refused_pods.is_refused(found)
    assert refused_pods.event_of(found) == refused_pods.event_of(pod)
    long = decoded(document("a", "Failed", status={**said, "message": "x" * LARGE}))
    assert refused_pods.event_of(kept(long)) == refused_pods.event_of(long)
    assert len(kept(long).status.message) < LARGE
    other = document("b", "Failed", status=said)
    other["spec"]["containers"][0]["resources"]["limits"] = {"example.com/other": "1"}
    assert not refused_pods.is_refused(kept(decoded(other)))


async def test_a_pod_is_not_judged_by_a_finished_one_of_its_name() -> None:
    cache = PodCache(None, "node")  # type: ignore[arg-type]
    cache.reflector.items.publish({"a": kept(decoded(document("a", "Failed")))})
    assert cache.find("team", "a") is None
    cache.reflector.items.publish({"a": kept(decoded(document("a")))})
    assert cache.find("team", "a") is not None
