"""Pods that wait learn why by one event on themselves, whichever replica leads."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from agent.extender import pending_pods
from agent.extender.explain import explain
from agent.model.modes import Mode
from agent.model.pod import VGPU, WAITING_FOR_GPU
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import leader

HINT = "tencent.com/predicate-gpu-idx-0"
CONDITIONS = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other quickly, and every pod is looked at each time."""
    monkeypatch.setattr(pending_pods, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(pending_pods, "AGAIN_SECONDS", 0.0)


def waits(api: ClusterApi, name: str, cores: int, blocks: int = 10) -> Object:
    """A pod for which kube-scheduler found no node."""
    pod = api.pod(name, cores, blocks)
    pod["status"]["conditions"] = CONDITIONS
    api.update(pod)
    return pod


async def until(reached: Callable[[], Any]) -> None:
    with anyio.fail_after(10):
        while not reached():
            await anyio.sleep(0.02)


def said(api: ClusterApi, pod: str) -> list[str]:
    events = [each for each in api.events.values() if each["involvedObject"]["name"] == pod]
    assert all(each["reason"] == WAITING_FOR_GPU and each["type"] == "Warning" for each in events)
    assert all(each["source"]["component"] == "gpu-node-agent-extender" for each in events)
    assert all(each["involvedObject"]["uid"] == pod for each in events)
    return [each["message"] for each in events]


async def test_a_pod_that_waits_is_told_once_and_again_only_for_another_reason() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    held = api.pod("held", 60, 10, "a", annotations={HINT: "0"})
    waits(api, "p", 60)
    api.pod("new", 60, 10)  # kube-scheduler has not looked at it yet
    async with api.serving():
        async with leader(api) as scheduler:
            await until(lambda: said(api, "p"))
            (sentence,) = said(api, "p")
            assert sentence == (
                f"no node has room now for 60 {VGPU.core} and 10 {VGPU.memory} of one GPU: largest free "
                "share 40 of 60 cores (1 node); ask for less, or wait: the pod starts when enough is free"
            )
            assert "held" not in sentence, "names of other tenants' pods are not shown"
            # Other figures and the same reason: no second event.
            held["spec"]["containers"][0]["resources"]["limits"][VGPU.core] = "70"
            api.update(held)
            waits(api, "later", 50)
            await until(lambda: said(api, "later"))
            assert said(api, "p") == [sentence]
            api.node("a", *gpus(1, Mode.MPS))
            await until(lambda: len(said(api, "p")) == 2)
            assert said(api, "p")[1] == (
                f"no node offers {VGPU.core}; ask for the resources of a mode that nodes are in, or have an "
                "administrator label a node nvidia-device-enable=vgpu"
            )
            assert scheduler.extender.blockers() == []
        # The next leader finds the same reasons, and writes none of them again.
        before = dict(api.events)
        waits(api, "third", 60)
        async with leader(api):
            await until(lambda: said(api, "third"))
        assert len(api.events) == len(before) + 1
        assert said(api, "new") == []


async def test_what_no_node_can_hold_is_said_with_the_remedy() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    waits(api, "large", 30, 5000)
    waits(api, "half", 30, 0)
    waits(api, "many", 400)
    async with api.serving(), leader(api):
        await until(lambda: all(said(api, name) for name in ("large", "half", "many")))
    (large,) = said(api, "large")
    assert large == (
        f"no node could hold 30 {VGPU.core} and 5000 {VGPU.memory} of one GPU even if it were empty; ask for "
        "less, or for nodes with larger GPUs"
    )
    assert "add tencent.com/vcuda-memory to its limits" in said(api, "half")[0]
    assert said(api, "half")[0].endswith("; correct the limits and create the pod again")
    assert "4 whole GPUs in mode vgpu even if it were empty; ask for less, or spread" in said(api, "many")[0]


async def test_gpus_of_other_agents_are_known_by_their_number_alone() -> None:
    api = ClusterApi()
    offers: dict[str, Any] = {"nvidia.com/gpu": 1}
    api.node("theirs", **offers)
    api.node("cpu")
    for name in ("held", "p"):
        pod = api.pod(name, 0, 0, "theirs" if name == "held" else "")
        pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
        pod["status"]["conditions"] = CONDITIONS
        api.update(pod)
    async with api.serving(), leader(api):
        await until(lambda: said(api, "p"))
        (sentence,) = said(api, "p")
        assert sentence == (
            "no node has room now for 1 x nvidia.com/gpu: 0 of 1 nvidia.com/gpu free by totals (no "
            "inventory) (1 node); ask for less, or wait: the pod starts when enough is free"
        )


async def test_a_pod_with_room_or_without_gpus_gets_no_event() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    waits(api, "fits", 60)
    bound = waits(api, "bound", 90)
    async with api.serving(), leader(api):
        bound["spec"]["nodeName"] = "a"
        bound["metadata"]["annotations"] |= {HINT: "0"}
        api.update(bound)
        waits(api, "sentinel", 200)
        await until(lambda: said(api, "sentinel"))
    assert said(api, "fits") == []
    assert said(api, "bound") == []


async def test_explain_answers_for_a_pod_that_died_at_admission() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("held", 60, 10, "a", annotations={HINT: "0"})
    dead = api.pod("dead", 60, 10, "a")
    dead["status"] = {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": "Pod was rejected: Allocate failed due to rpc error: no GPU has room",
    }
    dead["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "web-1", "controller": True}]
    ran = api.pod("ran", 60, 10, "a")
    ran["status"] = {"phase": "Failed", "reason": "Error", "containerStatuses": [{"name": "main"}]}
    async with api.serving(), api.client() as client:
        lines = await explain(client, "ns", "dead")
        assert lines[:3] == [
            "pod ns/dead was refused at admission by a and never started",
            "  UnexpectedAdmissionError: Pod was rejected: Allocate failed due to rpc error: no GPU has room",
            "it stays Failed; its ReplicaSet web-1 creates another one",
        ]
        assert "for another one like it:" in lines
        assert "  1 x largest free share 40 of 60 cores (a)" in lines
        assert await explain(client, "ns", "ran") == ["pod ns/ran is bound to node a"]
        del dead["metadata"]["ownerReferences"]
        assert "delete it and create it again" in (await explain(client, "ns", "dead"))[2]


async def test_thousands_of_one_tenant_s_pods_keep_nobody_from_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Created first, and more than are looked at before the first of them is due again."""
    monkeypatch.setattr(pending_pods, "PODS_A_LOOK", 4)
    api = ClusterApi()
    api.node("a", *gpus(1))
    for number in range(100):
        waits(api, f"crowd-{number}", 30, 0)
    other = api.pod("other", 30, 0)
    other["metadata"]["namespace"] = "theirs"
    other["status"]["conditions"] = CONDITIONS
    api.update(other)
    async with api.serving(), leader(api):
        await until(lambda: said(api, "other"))
        before = len(api.events)
        assert before < 50, "the other namespace has its turn with the first looks"
        # All of the crowd have theirs, too, though the first are due again long before.
        await until(lambda: len(api.events) == 101)


async def test_nodes_that_may_have_gpus_by_another_door_do_not_hide_the_reason() -> None:
    api = ClusterApi()
    api.node("plain")  # for filter it may have a DRA driver; kube-scheduler has found that it has not
    api.node("a", *gpus(1))
    pod = waits(api, "p", 1)
    pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    api.update(pod)
    async with api.serving(), leader(api) as scheduler:
        await until(lambda: said(api, "p"))
        assert said(api, "p")[0].startswith("no node offers nvidia.com/gpu; ")
        assert (await scheduler.filter(pod, ["plain"]))["NodeNames"] == ["plain"]
