"""The simulate verb: a question keeps nothing, and nodes that are not there yet are judged as objects."""

from typing import Any

import anyio

from agent.model.node_inventory import INVENTORY, NodeInventory, encode
from agent.model.placement import HINT
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import Scheduler, leader

VGPU_NODE = {"tencent.com/vcuda-core": "800", "tencent.com/vcuda-memory": "2560"}


async def simulate(scheduler: Scheduler, pod: Object, *nodes: Object | str) -> Any:
    """Names, or whole nodes; the answer."""
    names = [node for node in nodes if isinstance(node, str)]
    body = {"Pod": pod, "NodeNames": names} if names else {"Pod": pod, "Nodes": {"items": nodes}}
    status, answer = await scheduler.post("simulate", body)
    assert status == 200, answer
    return answer


def fits(answer: Any) -> list[str]:
    return [node["metadata"]["name"] for node in answer["Nodes"]["items"]]


def node(name: str, allocatable: dict[str, str], **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, "status": {"allocatable": allocatable}}


async def test_simulation_keeps_nothing() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        gang = [api.pod(f"member-{number}", 90, 10) for number in range(2)]
        for member in gang:
            member["spec"]["schedulingGroup"] = {"podGroupName": "gang"}
            api.update(member)
        fleet, serving = scheduler.extender.fleet, scheduler.extender.serving
        assert fleet is not None
        assert serving is not None
        with anyio.fail_after(10):
            while len(serving.binder.gangs.shown) < len(gang):
                await anyio.sleep(0.01)
        for _ in range(3):
            for member in gang:
                assert (await simulate(scheduler, member, "a"))["NodeNames"] == ["a"]
        assert (fleet.allocated(), fleet.waiting, fleet.pods) == ((0, 200), 0, 0)
        # Filter, which kube-scheduler asks, keeps; its gang's own choices are no refusal to a question.
        for member in gang:
            assert (await scheduler.filter(member, ["a"]))["NodeNames"] == ["a"]
        before = (fleet.allocated(), fleet.waiting)
        assert before == ((180, 200), 2)
        assert (await simulate(scheduler, gang[0], "a"))["NodeNames"] == ["a"]
        other = await simulate(scheduler, api.pod("other", 50, 10), "a")
        assert other["FailedNodes"] == {"a": "largest free share 10 of 50 cores"}
        assert (fleet.allocated(), fleet.waiting) == before
        assert await scheduler.bind(gang[0], "a") == ""
        assert (await simulate(scheduler, gang[0], "a"))["NodeNames"] == ["a"]


async def test_nodes_that_are_not_there_yet_are_judged_by_their_objects() -> None:
    api = ClusterApi()
    api.node("full", *gpus(1))
    api.pod("held", 90, 10, "full", annotations={f"{HINT}0": "0"})
    template = node("template", VGPU_NODE)
    # An autoscaler copies a node that is there, under another name: its inventory comes with it, no pods do.
    copied = node("copied", VGPU_NODE, annotations={INVENTORY: encode(NodeInventory(gpus(1)))})
    mps = node("mps", {"nvidia.com/mps-core": "200", "nvidia.com/mps-memory": "158"})
    whole = node("whole", {"nvidia.com/gpu": "4"})
    small = node("small", {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "64"})
    told = node("told", {"tencent.com/vcuda-core": "100"}, labels={"nvidia.com/gpu.memory": "81920"})
    full = node("full", VGPU_NODE)  # what the ledger knows is not taken from the request
    everything = (template, copied, mps, whole, small, told, full)
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 60, 100)
        answer = await simulate(scheduler, wants, *everything)
        assert fits(answer) == ["template", "copied", "told"]
        assert answer["FailedNodes"] == {
            "mps": "no GPU offered as vGPU",
            "whole": "no GPU offered as vGPU",
            "small": "largest free memory 64 of 100 blocks beside 60 cores",
            "full": "largest free share 10 of 60 cores",
        }
        # Of eight GPUs none has more than its own memory.
        assert fits(await simulate(scheduler, api.pod("large", 60, 321), template)) == []
        assert fits(await simulate(scheduler, api.pod("two", 200, 0), *everything)) == ["template"]
        share = api.pod("share", 1, 1)
        share["spec"]["containers"][0]["resources"]["limits"] = {
            "nvidia.com/mps-core": "50",
            "nvidia.com/mps-memory": "79",
        }
        assert fits(await simulate(scheduler, share, *everything)) == ["mps"]
        share["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "4"}
        assert fits(await simulate(scheduler, share, *everything)) == ["whole"]
        # Neither an object nor in the ledger: nobody knows.
        assert (await simulate(scheduler, wants, "nobody"))["FailedNodes"] == {
            "nobody": "node not known to the extender"
        }
        fleet = scheduler.extender.fleet
        assert fleet is not None
        assert list(fleet.nodes) == ["full"]


async def test_hundreds_of_new_nodes_are_judged_for_a_pod_that_is_hard_to_place() -> None:
    """Nodes of one group are alike, and no next question could go on where this one ended."""
    api = ClusterApi()
    odd = {"tencent.com/vcuda-core": "700", "tencent.com/vcuda-memory": "2240"}
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 60, 10)
        wants["spec"]["containers"] = [
            {"name": f"c{number}", "resources": {"limits": {"tencent.com/vcuda-core": str(size)}}}
            for number, size in enumerate((53, 52, 51, 49, 48, 47, 46, 34, 33, 33, 32, 32, 31, 30, 29, 28))
        ]
        for each in wants["spec"]["containers"]:
            each["resources"]["limits"]["tencent.com/vcuda-memory"] = "1"
        new = [node(f"new-{number}", VGPU_NODE if number % 2 else odd) for number in range(600)]
        answer = await simulate(scheduler, wants, *new)
        assert not [why for why in answer["FailedNodes"].values() if why.startswith("not reached")]
        assert len(fits(answer)) + len(answer["FailedNodes"]) == 600
        assert len(set(answer["FailedNodes"].values())) <= 2


async def test_a_node_that_cannot_be_imagined_is_judged_by_totals_or_refused() -> None:
    api = ClusterApi()
    async with api.serving(), leader(api) as scheduler:
        wants = api.pod("wants", 60, 100)
        huge = node("huge", {"tencent.com/vcuda-core": "1E", "tencent.com/vcuda-memory": "1E"})
        assert fits(await simulate(scheduler, wants, huge)) == ["huge"]
        broken = {"metadata": {"name": "broken"}, "status": {"allocatable": 7}}
        status, text = await scheduler.post("simulate", {"Pod": wants, "Nodes": {"items": [broken]}})
        assert (status, text.count("nothing was done")) == (400, 1)
        wrong = api.pod("wrong", 150, 10)
        answer = await simulate(scheduler, wrong, node("template", VGPU_NODE))
        assert "multiple of 100" in answer["FailedAndUnresolvableNodes"]["template"]
        plain = api.pod("plain", 0, 0)
        plain["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "1"}
        assert fits(await simulate(scheduler, plain, node("template", {}))) == ["template"]
