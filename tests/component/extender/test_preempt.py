"""The preempt verb: no pod is evicted where its GPUs would not help, and none that need not go."""

from typing import Any

import anyio

from agent.model.placement import HINT
from agent.model.pod import VGPU
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import leader

HINT_0 = f"{HINT}0"


def held(api: ClusterApi, name: str, cores: int, gpu: int, node: str = "a") -> None:
    api.pod(name, cores, 16, node, annotations={HINT_0: str(gpu)})


def two_full_gpus() -> ClusterApi:
    """Each GPU of node a is held by a pod of 60 and one of 30 cores."""
    api = ClusterApi()
    api.node("a", *gpus(2))
    for gpu in (0, 1):
        held(api, f"large-{gpu}", 60, gpu)
        held(api, f"small-{gpu}", 30, gpu)
    return api


async def test_a_node_whose_victims_leave_no_gpu_with_room_does_not_count() -> None:
    api = two_full_gpus()
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 50, 16)
        # By totals 20 cores are free, and one pod of 30 makes 50 of them.
        assert await scheduler.preempt(wants, {"a": ["small-1"]}) == {}
        assert await scheduler.preempt(wants, {"a": ["small-0", "small-1"]}) == {}
        assert await scheduler.preempt(wants, {"a": ["large-1"]}) == {"a": ["large-1"]}
        assert await scheduler.preempt(wants, {"a": ["large-1"], "unknown": ["x"]}) == {"a": ["large-1"]}


async def test_victims_whose_gpus_are_not_needed_are_given_back_from_the_most_important_on() -> None:
    api = two_full_gpus()
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 50, 16)
        everything = ["large-0", "small-0", "large-1", "small-1"]
        assert await scheduler.preempt(wants, {"a": everything}) == {"a": ["large-1"]}
        # One that holds no GPU goes for a reason that is not known here.
        assert await scheduler.preempt(wants, {"a": ["no-gpu", "large-0", "small-1"]}) == {
            "a": ["no-gpu", "large-0"]
        }


async def test_a_victim_that_repels_other_pods_is_not_given_back() -> None:
    api = two_full_gpus()
    terms = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "train"}}}]
    for name, kind in (
        ("small-0", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("small-1", "preferredDuringSchedulingIgnoredDuringExecution"),
    ):
        api.pods[name]["spec"]["affinity"] = {"podAntiAffinity": {kind: terms}}
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 50, 16, labels={"app": "train"})
        # Without small-0 the pod could not come, wherever its GPUs are: large-1 would be evicted in vain.
        assert await scheduler.preempt(wants, {"a": ["large-1", "small-0", "small-1"]}) == {
            "a": ["large-1", "small-0"]
        }
        api.end("large-1")
        with anyio.fail_after(5):
            while await scheduler.preempt(wants, {"a": ["small-1"]}):
                await anyio.sleep(0.02)
        # The GPUs are free by now; what repels the pod still has to go.
        assert await scheduler.preempt(wants, {"a": ["small-0"]}) == {"a": ["small-0"]}


async def test_where_cpu_may_be_the_reason_every_victim_goes() -> None:
    api = two_full_gpus()
    async with api.serving(), leader(api) as scheduler:
        for number, change in enumerate(CHANGES):
            wants = api.pod(f"wants-{number}", 50, 16)
            wants["spec"] |= change
            found = await scheduler.preempt(wants, {"a": ["large-0", "small-1"]})
            assert found == {"a": ["large-0", "small-1"]}, change


GPUS = {VGPU.core: "50", VGPU.memory: "16"}
CHANGES: list[dict[str, Any]] = [
    {"containers": [{"name": "main", "resources": {"limits": GPUS, "requests": {"cpu": "1"}}}]},
    {"containers": [{"name": "main", "resources": {"limits": GPUS}, "ports": [{"hostPort": 80}]}]},
    {"affinity": {"podAntiAffinity": {}}},
    {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]},
]


async def test_a_pod_without_gpus_and_one_that_nothing_can_grant() -> None:
    api = two_full_gpus()
    async with api.serving(), leader(api) as scheduler:
        plain: Object = api.pod("plain", 0, 0)
        plain["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1"}}
        assert await scheduler.preempt(plain, {"a": ["large-0"]}) == {"a": ["large-0"]}
        assert await scheduler.preempt(api.pod("odd", 150, 1), {"a": ["large-0"]}) == {}


async def test_a_node_without_inventory_is_judged_by_totals() -> None:
    api = ClusterApi()
    totals: dict[str, Any] = {VGPU.core: 100, VGPU.memory: 320}
    api.node("a", **totals)
    held(api, "large", 60, 0)
    held(api, "small", 30, 0)
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 50, 16)
        assert await scheduler.preempt(wants, {"a": ["small"]}) == {}
        assert await scheduler.preempt(wants, {"a": ["large"]}) == {"a": ["large"]}


async def test_whole_victims_are_understood_and_a_request_without_any_is_refused() -> None:
    api = two_full_gpus()
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 50, 16)
        victims = {"a": {"Pods": [api.pods["large-0"]], "NumPDBViolations": 1}}
        status, answer = await scheduler.post("preempt", {"Pod": wants, "NodeNameToVictims": victims})
        assert status == 200
        assert answer == {
            "NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "large-0"}], "NumPDBViolations": 1}}
        }
        status, text = await scheduler.post("preempt", {"Pod": wants})
        assert (status, "neither" in text) == (400, True)
