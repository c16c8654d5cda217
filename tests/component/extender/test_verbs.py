"""The extender over real HTTP: both node forms, the binding, and what may be wrong with a request."""

import json
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agent.extender.binder import MOST_IN_VAIN
from agent.extender.explain import explain
from agent.extender.handlers import MOST_LOOKS
from agent.model.modes import UNCLAIMED, Mode
from agent.model.node_inventory import GpuEntry
from agent.model.pod import VGPU
from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import leader

HINT = "tencent.com/predicate-gpu-idx-0"


async def test_names_only() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    api.node("b", GpuEntry("GPU-9", 3, Mode.VGPU, 81920, trouble="Xid 79"))
    api.pod("held", 60, 10, "a", annotations={HINT: "0"})
    api.pod("held2", 70, 10, "a", annotations={HINT: "1"})
    async with api.serving(), leader(api) as scheduler:
        answer = await scheduler.filter(api.pod("p", 60, 10), ["a", "b", "c"])
        assert answer["NodeNames"] == []
        assert answer["FailedNodes"] == {
            "a": "largest free share 40 of 60 cores",
            "b": "GPU 3 unhealthy",
            "c": "node not known to the extender",
        }
        assert (await scheduler.filter(api.pod("q", 40, 10), ["a", "b"]))["NodeNames"] == ["a"]


async def test_whole_nodes_come_back_as_they_came() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.node("b", *gpus(1))
    api.pod("held", 60, 10, "b", annotations={HINT: "0"})
    nodes = [{"metadata": {"name": n, "labels": {"x": "é"}}, "spec": {"podCIDR": "10.0.0.0/8"}} for n in "ab"]
    async with api.serving(), leader(api) as scheduler:
        pod = api.pod("p", 60, 10)
        _, answer = await scheduler.post("predicates", {"Pod": pod, "Nodes": {"items": nodes}})
        assert answer["Nodes"] == {"items": nodes[:1]}
        assert answer["NodeNames"] is None
        assert list(answer["FailedNodes"]) == ["b"]


async def test_the_best_node_scores_ten() -> None:
    api = ClusterApi()
    for name, held in (("a", 0), ("b", 40), ("c", 20)):
        api.node(name, *gpus(1))
        if held:
            api.pod(f"on-{name}", held, 10, name, annotations={HINT: "0"})
    async with api.serving(), leader(api, placement="binpack") as scheduler:
        body = {"Pod": api.pod("p", 30, 10), "Nodes": None, "NodeNames": ["a", "b", "c"]}
        _, answer = await scheduler.post("priorities", body)
        assert answer == [{"Host": "a", "Score": 8}, {"Host": "b", "Score": 10}, {"Host": "c", "Score": 9}]
        spread = api.pod("s", 30, 10, annotations={"gpu-node-agent.io/placement": "spread"})
        _, answer = await scheduler.post("priorities", body | {"Pod": spread})
        assert {one["Host"]: one["Score"] for one in answer} == {"a": 10, "c": 9, "b": 8}


async def test_bound_and_chosen_in_one_write() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        for number in range(4):
            pod = api.pod(f"p{number}", 60, 10, annotations={HINT: "7", "tencent.com/gpu-assigned": "true"})
            fits = (await scheduler.filter(pod, ["a"]))["NodeNames"] == ["a"]
            assert fits == (number < 2)
            error = await scheduler.bind(pod, "a")
            assert (error == "") == fits, error
        assert error == "a has no room any more: largest free share 40 of 60 cores"
        written = [binding["metadata"]["annotations"] for binding in api.bindings]
        assert [one[HINT] for one in written] == ["0", "1"]
        assert {one["tencent.com/predicate-node"] for one in written} == {"a"}
        assert {one["tencent.com/gpu-assigned"] for one in written} == {"false"}
        assert api.pods["p0"]["metadata"]["annotations"][HINT] == "0"
        await scheduler.settled()
        api.end("p0")
        with anyio.fail_after(5):
            while (await scheduler.filter(api.pod("again", 60, 10), ["a"]))["NodeNames"] != ["a"]:
                await anyio.sleep(0.02)


@pytest.mark.parametrize("unheard", [1, MOST_LOOKS / 2])
async def test_a_pod_that_is_tried_before_its_room_is_heard_of_fits_all_the_same(
    monkeypatch: pytest.MonkeyPatch, unheard: float
) -> None:
    """kube-scheduler hears of the end of a pod by a watch of its own, and asks at once."""
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("holds", 60, 10, "a", annotations={HINT: "0"})
    async with api.serving(), leader(api) as scheduler:
        waits = api.pod("waits", 60, 10)
        fleet, serving = scheduler.extender.fleet, scheduler.extender.serving
        assert fleet is not None
        assert serving is not None
        judge, looks = serving.verdicts.judge, 0

        async def judged(*arguments: Any) -> tuple[list[str], dict[str, str]]:
            """The room is heard of after `unheard` looks, however late this machine hears."""
            nonlocal looks
            looks += 1
            answer = await judge(*arguments)
            assert answer[0] == [] or looks > unheard
            if looks >= unheard and "holds" in api.pods:
                api.end("holds")
                while fleet.where("holds"):
                    await anyio.sleep(0.01)
            return answer

        monkeypatch.setattr(serving.verdicts, "judge", judged)
        assert (await scheduler.filter(waits, ["a"]))["NodeNames"] == ["a"]


async def test_who_leads_no_more_while_it_looks_again_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal would keep the pod from the next leader until something happens; an error does not."""
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("holds", 60, 10, "a", annotations={HINT: "0"})
    async with api.serving(), leader(api) as scheduler:
        serving, sync = scheduler.extender.serving, scheduler.extender.sync
        assert serving is not None
        assert sync is not None
        judge = serving.verdicts.judge

        async def judged(*arguments: Any) -> tuple[list[str], dict[str, str]]:
            sync.complete.publish(False)
            return await judge(*arguments)

        monkeypatch.setattr(serving.verdicts, "judge", judged)
        body = {"Pod": api.pod("waits", 60, 10), "Nodes": None, "NodeNames": ["a"]}
        status, answer = await scheduler.post("predicates", body)
        assert status == 503
        assert "leads no more" in answer


async def test_pods_that_fit_nowhere_cost_the_scheduler_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.pod("holds", 60, 10, "a", annotations={HINT: "0"})
    async with api.serving(), leader(api) as scheduler:
        serving = scheduler.extender.serving
        assert serving is not None
        judge, looks = serving.verdicts.judge, 0

        async def counted(*arguments: Any) -> tuple[list[str], dict[str, str]]:
            nonlocal looks
            looks += 1
            return await judge(*arguments)

        monkeypatch.setattr(serving.verdicts, "judge", counted)
        began, asked = anyio.current_time(), 4 * int(MOST_LOOKS)
        for number in range(asked):
            answer = await scheduler.filter(api.pod(f"p{number}", 60, 10), ["a"])
            assert answer["NodeNames"] == []
        # Each second look costs a pause.
        assert asked < looks <= asked + MOST_LOOKS + (anyio.current_time() - began)


async def test_many_at_once_never_share_a_unit() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    errors: list[str] = []
    async with api.serving(), leader(api) as scheduler:

        async def one(number: int) -> None:
            pod = api.pod(f"p{number}", 40, 10)
            await scheduler.filter(pod, ["a"])
            errors.append(await scheduler.bind(pod, "a"))

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, number)
    assert errors.count("") == 4
    chosen = [binding["metadata"]["annotations"][HINT] for binding in api.bindings]
    assert sorted(chosen) == ["0", "0", "1", "1"]


async def test_a_refused_binding_frees_its_units_at_once() -> None:
    api = ClusterApi(refuse=403)
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        assert "403" in await scheduler.bind(api.pod("p", 60, 10), "a")
        assert (await scheduler.filter(api.pod("q", 60, 10), ["a"]))["NodeNames"] == ["a"]


async def test_a_conflict_may_mean_that_the_pod_is_bound_and_frees_nothing() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        fleet = scheduler.extender.fleet
        assert fleet is not None
        pod = api.pod("p", 60, 10)
        # Bound by a write whose answer was lost; the watch has not shown it yet.
        pod["spec"]["nodeName"] = "a"
        assert "409" in await scheduler.bind(pod, "a")
        assert "409" in await scheduler.bind(pod, "a"), "kube-scheduler tries again"
        assert (await scheduler.filter(api.pod("q", 60, 10), ["a"]))["NodeNames"] == []
        assert "no room any more" in await scheduler.bind(api.pod("q", 60, 10), "a")
        api.update(pod)
        await scheduler.settled()
        api.end("p")
        with anyio.fail_after(10):
            while fleet.pods:
                await anyio.sleep(0.02)
        assert await scheduler.bind(api.pod("r", 60, 10), "a") == ""
        assert scheduler.extender.serving is not None
        assert scheduler.extender.serving.binder._open == set(), "nothing is kept of pods that are gone"


async def test_a_binding_whose_answer_is_lost_still_counts() -> None:
    api = ClusterApi(lose_answers=True)
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        assert "500" in await scheduler.bind(api.pod("p", 60, 10), "a")
        assert (await scheduler.filter(api.pod("q", 60, 10), ["a"]))["NodeNames"] == []
        await scheduler.settled()
        assert (await scheduler.filter(api.pod("q", 60, 10), ["a"]))["NodeNames"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("predicates", b""),
        ("predicates", b"{" * 100_000),
        ("predicates", b'{"Pod":' + b"[" * 100_000),
        ("predicates", b"\xff\xfe"),
        ("predicates", b"[]"),
        ("predicates", b'{"Pod":{"metadata":{"uid":"u"}}}'),
        ("predicates", b'{"Pod":{"metadata":{}},"NodeNames":[]}'),
        ("predicates", b'{"Pod":{"metadata":{"uid":"u"}},"NodeNames":[1]}'),
        ("predicates", b'{"Pod":{"metadata":{"uid":"u"}},"Nodes":{"items":[{}]}}'),
        ("priorities", b'{"NodeNames":["a"]}'),
        ("preempt", b'{"Pod":{"metadata":{"uid":"u"}}}'),
        ("preempt", b'{"Pod":{"metadata":{"uid":"u"},"spec":{"volumes":[1]}},"NodeNameToMetaVictims":{}}'),
        ("preempt", b'{"Pod":{"metadata":{"uid":"u"}},"NodeNameToMetaVictims":{"a":{"Pods":[{}]}}}'),
        ("bind", b"null"),
        ("bind", b'{"PodName":"p","PodNamespace":"ns","PodUID":"","Node":"a"}'),
        ("bind", b'{"PodName":"p","PodNamespace":"ns","PodUID":"u","Node":7}'),
        ("bind", b'{"PodName":"../../../nodes/a","PodNamespace":"ns","PodUID":"u","Node":"a"}'),
        ("bind", b'{"PodName":"p","PodNamespace":"ns/pods/q/binding?","PodUID":"u","Node":"a"}'),
        ("bind", b'{"PodName":"p","PodNamespace":"ns","PodUID":"u","Node":"a%2f"}'),
        ("bind", b'{"PodName":"p\\n","PodNamespace":"ns","PodUID":"u","Node":"a"}'),
        ("bind", b'{"PodName":"' + b"p" * 254 + b'","PodNamespace":"ns","PodUID":"u","Node":"a"}'),
        ("bind", b"x" * (1 << 20) + b"x"),
    ],
)
async def test_what_cannot_be_understood_changes_nothing(path: str, body: bytes) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api, **{"http.mostMebibytes": 1}) as scheduler:
        status, text = await scheduler.post(path, body)
        assert status == 400
        assert text.count("\n") == 1
        assert "nothing was done" in text
        assert api.bindings == []
        assert scheduler.extender.fleet is not None
        assert scheduler.extender.fleet.pods == 0


async def test_pods_without_gpus_are_not_bound() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    plain = api.pod("plain", 0, 0)
    plain["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "1"}
    async with api.serving(), leader(api) as scheduler:
        # The caller's copy of the pod in filter changes nothing.
        lie = json.loads(json.dumps(plain))
        lie["spec"]["containers"][0]["resources"]["limits"] = {VGPU.core: "10", VGPU.memory: "1"}
        assert (await scheduler.filter(lie, ["a"]))["NodeNames"] == ["a"]
        assert "asks for no GPU" in await scheduler.bind(plain, "a")
        assert api.bindings == []
        assert scheduler.extender.fleet is not None
        assert scheduler.extender.fleet.waiting == 0


@pytest.mark.parametrize("answer", [0, 404])
async def test_a_pod_that_asks_for_zero_gpus_is_bound_and_keeps_nobody_waiting(answer: int) -> None:
    """kube-scheduler leaves it to the extender, as its container names a managed resource."""
    api = ClusterApi()
    api.node("a", *gpus(1))
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "rs", "controller": True}
    pods = [api.pod(name, 0, 0, ownerReferences=[owner]) for name in ("one", "two")]
    for pod in pods:
        pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "0"}
    async with api.serving(), leader(api) as scheduler:
        serving = scheduler.extender.serving
        assert serving is not None
        for pod in pods:
            assert (await scheduler.filter(pod, ["a"]))["NodeNames"] == ["a"]
            body = {"Pod": pod, "Nodes": None, "NodeNames": ["a"]}
            assert (await scheduler.post("priorities", body))[0] == 200
        assert serving.binder._patience == MOST_IN_VAIN
        api.refuse = answer
        assert (await scheduler.bind(pods[0], "a") == "") == (not answer)
        assert [each["metadata"]["annotations"] for each in api.bindings] == [{}] * (not answer)
        assert serving.verdicts.fleet.waiting == 0


async def test_a_request_that_nothing_can_grant_is_told_as_such() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        answer = await scheduler.filter(api.pod("p", 150, 10), ["a"])
        assert "multiple of 100" in answer["FailedAndUnresolvableNodes"]["a"]
        assert (answer["NodeNames"], answer["FailedNodes"]) == ([], {})


async def test_inventories_that_cannot_be_read_are_judged_by_totals_and_told() -> None:
    api = ClusterApi()
    totals: dict[str, Any] = {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 320}
    api.node("old", **totals)
    api.node("new", text='{"v":9,"gpus":[]}', **totals)
    async with api.serving(), leader(api) as scheduler:
        pod = api.pod("p", 60, 10)
        assert (await scheduler.filter(pod, ["old", "new"]))["NodeNames"] == ["old", "new"]
        assert await scheduler.bind(pod, "old") == ""
        assert api.bindings[0]["metadata"]["annotations"] == {}
        answer = await scheduler.filter(api.pod("q", 60, 10), ["old"])
        assert answer["FailedNodes"] == {
            "old": "40 of 60 tencent.com/vcuda-core free by totals (no inventory)"
        }
        _, page = await scheduler.get("/metrics")
        assert "gpu_agent_extender_nodes_without_inventory 2.0" in page
        assert "gpu_agent_extender_nodes_bad_inventory 1.0" in page


async def test_dra_nodes_pass() -> None:
    api = ClusterApi()
    api.node("dra")  # no plugin, so no allocatable: a ResourceSlice, which kube-scheduler has judged
    units: dict[str, Any] = {"nvidia.com/gpu": 2}
    api.node("plugin", **units)
    api.node("ours", *gpus(1))
    api.node("broken", text='{"v":9,"gpus":[]}')
    async with api.serving(), leader(api) as scheduler:
        held, pod = (api.pod(name, 1, 1) for name in ("held", "pod"))
        for each in (held, pod):
            each["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "2"}
        assert (await scheduler.filter(held, ["dra", "plugin"]))["NodeNames"] == ["dra", "plugin"]
        assert await scheduler.bind(held, "plugin") == ""
        answer = await scheduler.filter(pod, ["dra", "plugin", "ours", "broken"])
        assert answer["NodeNames"] == ["dra"]
        assert answer["FailedNodes"] == {
            "plugin": "0 of 2 nvidia.com/gpu free by totals (no inventory)",
            "ours": "no GPU offered as pgpu",
            "broken": "0 of 2 nvidia.com/gpu free by totals (no inventory)",
        }
        async with api.client() as client:
            lines = await explain(client, "ns", "pod")
        assert "  1 x no nvidia.com/gpu offered, unless a DRA driver serves it (dra)" in lines
        assert await scheduler.bind(pod, "dra") == ""
        assert api.bindings[-1]["metadata"]["annotations"] == {}
        # Shares are served by no other door: a node without them is refused.
        assert (await scheduler.filter(api.pod("share", 60, 10), ["dra"]))["NodeNames"] == []


async def test_nodes_of_the_second_door_pass() -> None:
    api = ClusterApi()
    devices = [replace(each, mode=UNCLAIMED) for each in gpus(2)]
    none: dict[str, Any] = {"nvidia.com/gpu": 0}
    api.node("claims", *devices, **none)  # a plugin of no units stands beside it
    api.node("mixed", devices[0], gpus(2)[1], **none)
    async with api.serving(), leader(api) as scheduler:
        pod = api.pod("pod", 1, 1)
        pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "2"}
        answer = await scheduler.filter(pod, ["claims", "mixed"])
        assert answer["NodeNames"] == ["claims"]
        async with api.client() as client:
            lines = await explain(client, "ns", "pod")
        assert "  1 x its GPUs are devices of DRA, judged by kube-scheduler (claims)" in lines
        claimant = api.pod("claimant", 1, 1)
        claimant["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        claimant["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
        async with api.client() as client:
            (line,) = await explain(client, "ns", "claimant")
        assert "asks by claims (gpu), judged by kube-scheduler" in line
        assert await scheduler.bind(pod, "claims") == ""
        assert (await scheduler.filter(api.pod("share", 60, 10), ["claims"]))["NodeNames"] == []


async def test_the_kubelets_records_win_over_what_a_tenant_wrote() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        pod = api.pod("p", 90, 10, "a", annotations={HINT: "1", "tencent.com/gpu-assigned": "true"})
        held = [{"resourceID": f"GPU-0::c{n}"} for n in range(90)]
        memory = [{"resourceID": f"GPU-0::m{n}"} for n in range(10)]
        devices = [
            {"name": "tencent.com/vcuda-core", "resources": held},
            {"name": "tencent.com/vcuda-memory", "resources": memory},
        ]
        pod["status"]["containerStatuses"] = [{"name": "main", "allocatedResourcesStatus": devices}]
        api.update(pod)
        fleet = scheduler.extender.fleet
        assert fleet is not None
        with anyio.fail_after(10):
            while (shown := fleet.bound.get("p")) is None or shown.claim.held is None:
                await anyio.sleep(0.01)
        assert await scheduler.bind(api.pod("q", 90, 10), "a") == ""
        assert api.bindings[0]["metadata"]["annotations"][HINT] == "1"


async def test_explain_says_what_would_have_to_go() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.node("b", GpuEntry("GPU-1", 0, Mode.VGPU, 81920, trouble="Xid 79"))
    api.pod("small", 20, 10, "a", annotations={HINT: "0"})
    api.pod("large", 70, 10, "a", annotations={HINT: "0"})
    api.pod("p", 60, 10)
    api.pod("q", 25, 10)
    async with api.serving(), api.client() as client:
        lines = await explain(client, "ns", "p")
        assert lines[0] == "pod ns/p asks for 60 tencent.com/vcuda-core, 10 tencent.com/vcuda-memory"
        assert "  1 x largest free share 10 of 60 cores (a)" in lines
        assert "  1 x GPU 0 unhealthy (b)" in lines
        assert lines[-1] == "  on a: ns/large"
        assert (await explain(client, "ns", "q"))[-1] == "  on a: ns/small"
        assert json.dumps(await explain(client, "ns", "small")).count("bound to node a") == 1


async def test_explain_says_why_a_static_pod_cannot_have_a_share() -> None:
    api = ClusterApi()
    mirror = {"kubernetes.io/config.mirror": "a-hash"}
    api.pod("share-a", 60, 10, "a", annotations=mirror)
    whole = api.pod("whole-a", 0, 0, "a", annotations=mirror)
    whole["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    async with api.serving(), api.client() as client:
        bound, why = await explain(client, "ns", "share-a")
        assert bound.endswith("is bound to node a")
        assert why.startswith("a static pod cannot have a share")
        assert why.endswith("use a DaemonSet")
        assert len(await explain(client, "ns", "whole-a")) == 1
