"""All members of a gang are filtered before one is bound: each has GPUs of its own, or is not sent."""

import json
from copy import deepcopy
from dataclasses import replace

import anyio
import pytest

from agent.extender import gangs
from agent.extender.objects import GROUP_LABEL
from agent.model.placement import HINT
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import Scheduler, leader


def member(api: ClusterApi, name: str, group: str = "gang", cores: int = 40) -> Object:
    made = api.pod(name, cores, 10)
    made["spec"]["schedulingGroup"] = {"podGroupName": group}
    api.update(made)
    return made


async def sent(scheduler: Scheduler, pod: Object, *nodes: str) -> list[str]:
    return list((await scheduler.filter(pod, nodes))["NodeNames"])


async def test_gang_is_not_half_bound() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    for number in (0, 1):  # 60 cores are left on each of two GPUs
        api.pod(f"held-{number}", 40, 10, "a", annotations={f"{HINT}0": str(number)})
    async with api.serving(), leader(api) as scheduler:
        gang = [member(api, f"member-{number}") for number in range(3)]
        assert [await sent(scheduler, pod, "a") for pod in gang] == [["a"], ["a"], []]
        answer = await scheduler.filter(gang[2], ["a"])
        assert answer["FailedNodes"] == {"a": "largest free share 20 of 40 cores"}
        # Others do not get what is kept, and each member is bound to its own.
        assert await sent(scheduler, api.pod("other", 40, 10), "a") == []
        assert [await scheduler.bind(pod, "a") for pod in gang[:2]] == ["", ""]
        chosen = [one["metadata"]["annotations"][f"{HINT}0"] for one in api.bindings]
        assert sorted(chosen) == ["0", "1"]


async def test_a_member_that_is_filtered_again_keeps_no_second_place() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.node("b", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        gang = [member(api, f"member-{number}", cores=90) for number in range(2)]
        for _ in range(3):
            places = [await sent(scheduler, pod, "a", "b") for pod in gang]
            assert sorted(places) == [["a"], ["b"]]
        assert await sent(scheduler, gang[0], "b") == []  # the other one's
        assert await sent(scheduler, gang[0], "a", "b") == [
            name for name in ("a", "b") if [name] != places[1]
        ]


async def test_what_was_kept_is_bound_elsewhere_and_let_go() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    api.node("b", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        pod = member(api, "member", cores=90)
        (kept,) = await sent(scheduler, pod, "a", "b")
        (other,) = {"a", "b"} - {kept}
        assert await scheduler.bind(pod, other) == ""
        assert await sent(scheduler, api.pod("next", 90, 10), "a", "b") == [kept]


async def test_a_gang_that_was_refused_keeps_little_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "REFUSED_SECONDS", 0.5)
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        first, second = (member(api, name, cores=60) for name in ("first", "second"))
        assert await sent(scheduler, first, "a") == ["a"]
        assert await sent(scheduler, second, "a") == []
        other = api.pod("other", 60, 10)
        with anyio.fail_after(20):  # by the gang's refusal, not sixty seconds
            while await sent(scheduler, other, "a") != ["a"]:
                await anyio.sleep(0.05)


async def test_groups_of_the_coscheduling_plugin_are_gangs_too() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        gang = [api.pod(name, 60, 10, labels={GROUP_LABEL: "gang"}) for name in ("first", "second")]
        assert [await sent(scheduler, pod, "a") for pod in gang] == [["a"], []]
        alone = [api.pod(name, 30, 10) for name in ("third", "fourth")]
        assert [await sent(scheduler, pod, "a") for pod in alone] == [["a"], ["a"]]


async def until_free(scheduler: Scheduler, pod: Object, node: str) -> None:
    """Wait until a pod fits, much less than what is kept for a gang would last."""
    with anyio.fail_after(4):
        while await sent(scheduler, pod, node) != [node]:
            await anyio.sleep(0.02)


async def test_forged_filters_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may name pods that do not exist, or lie about one that does."""
    monkeypatch.setattr(gangs, "SHOWN_SECONDS", 0.1)
    api = ClusterApi()
    api.node("a", *gpus(8))
    true = member(api, "true", cores=30)
    bound = member(api, "bound", cores=30)
    async with api.serving(), leader(api) as scheduler:
        assert await scheduler.bind(bound, "a") == ""
        await scheduler.settled()
        fleet = scheduler.extender.fleet
        assert fleet is not None
        before = fleet.allocated()

        async def forge(number: int) -> None:
            forged = deepcopy(true)
            forged["metadata"] |= {"name": f"x{number}", "uid": f"x{number}"}
            await scheduler.filter(forged, ["a"])

        async with anyio.create_task_group() as group:
            for number in range(64):
                group.start_soon(forge, number)
        larger, other = deepcopy(true), deepcopy(bound)
        larger["spec"]["containers"][0]["resources"]["limits"] = {
            "tencent.com/vcuda-core": "800",
            "tencent.com/vcuda-memory": "2000",
        }
        other["spec"]["containers"][0]["resources"]["limits"]["tencent.com/vcuda-core"] = "90"
        for lie in (larger, other, bound):
            await scheduler.filter(lie, ["a"])
        assert (fleet.allocated(), fleet.waiting) == (before, 0)
        # A lie takes nothing from the true one either, nor its gang's time.
        assert await sent(scheduler, true, "a") == ["a"]
        assert fleet.waiting == 1
        for lie in (larger, {**deepcopy(larger), "metadata": larger["metadata"] | {"uid": "x"}}):
            assert await sent(scheduler, lie, "a") == []
        assert await sent(scheduler, larger) == []
        assert fleet.waiting == 1
        assert await scheduler.bind(true, "a") == ""


async def test_forged_filters_take_nothing_from_a_member() -> None:
    """Who names other nodes, or none, for a pod of somebody else neither frees its GPUs nor moves it."""
    api = ClusterApi()
    for name in ("a", "b", "full"):
        api.node(name, *gpus(1))
    api.pod("held", 90, 10, "full")
    async with api.serving(), leader(api) as scheduler:
        pod = member(api, "member", cores=90)
        (kept,) = await sent(scheduler, pod, "a", "b")
        (other,) = {"a", "b"} - {kept}
        assert scheduler.extender.serving is not None
        gangs_ = scheduler.extender.serving.binder.gangs
        assert await sent(scheduler, pod) == []
        assert not gangs_._refused
        assert await sent(scheduler, pod, "full") == []
        assert gangs_.node("member") == kept
        for _ in range(3):
            assert await sent(scheduler, pod, "a", "b") == [kept]
        assert await sent(scheduler, pod, other) == [other]  # its scheduler has reasons of its own
        assert (gangs_.node("member"), scheduler.extender.fleet and scheduler.extender.fleet.waiting) == (
            other,
            1,
        )


async def test_nothing_is_kept_for_a_member_that_no_scheduler_looks_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gates of its own a pending pod waits for ever, and would hold GPUs by forged calls."""
    monkeypatch.setattr(gangs, "SHOWN_SECONDS", 0.1)
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        pod = api.pod("gated", 90, 10)
        pod["spec"] |= {"schedulingGroup": {"podGroupName": "g"}, "schedulingGates": [{"name": "never"}]}
        api.update(pod)
        await scheduler.settled()
        fleet = scheduler.extender.fleet
        assert fleet is not None
        await sent(scheduler, pod, "a")
        assert fleet.waiting == 0
        del pod["spec"]["schedulingGates"]
        api.update(pod)
        with anyio.fail_after(4):
            while fleet.waiting == 0:
                await sent(scheduler, pod, "a")


async def test_deleted_pending_pod_lets_go() -> None:
    """A tenant makes and deletes pods one at a time, so that no quota ever sees two."""
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        other = api.pod("other", 90, 10)
        for number in range(2):
            mine = member(api, f"mine-{number}", f"gang-{number}", cores=90)
            assert await sent(scheduler, mine, "a") == ["a"]
        assert await sent(scheduler, other, "a") == []
        api.end("mine-0")
        await until_free(scheduler, other, "a")
        # Deleted, with a finalizer that keeps the object.
        mine["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
        fleet = scheduler.extender.fleet
        assert fleet is not None
        assert fleet.waiting == 1
        api.update(mine)
        await until_free(scheduler, other, "a")
        with anyio.fail_after(4):
            while fleet.waiting:
                await anyio.sleep(0.02)


async def test_what_a_scheduler_without_the_bind_verb_binds_is_not_let_go_between_two_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gangs, "LEFT_SECONDS", 60.0)
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        mine, later = member(api, "mine", cores=90), member(api, "later", cores=5)
        assert await sent(scheduler, mine, "a") == ["a"]
        fleet = scheduler.extender.fleet
        assert fleet is not None
        api.bound_shown.publish(False)
        mine["spec"]["nodeName"] = "a"
        api.update(mine)
        later["spec"]["schedulingGroup"] = {"podGroupName": "another"}
        api.update(later)  # once this is known, so is the end of the other
        shown = scheduler.extender.serving.binder.gangs._shown  # type: ignore[union-attr]
        with anyio.fail_after(4):
            while shown.get("mine") or shown["later"].gang != "ns/another":
                await anyio.sleep(0.01)
        assert fleet.where("mine") == "a"
        api.bound_shown.publish(True)
        await scheduler.settled()
        assert fleet.where("mine") == "a"


async def test_gangs_wait_while_nobody_knows_which_pods_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a place of its own each, two members would be sent to room for one."""
    monkeypatch.setattr(gangs, "SHOWN_SECONDS", 0.1)
    api = ClusterApi()
    api.node("a", *gpus(1))
    alone = api.pod("alone", 30, 10)
    mine = deepcopy(alone)
    mine["metadata"]["uid"] = "not shown yet"
    mine["spec"]["schedulingGroup"] = {"podGroupName": "gang"}
    async with api.serving(), leader(api) as scheduler:
        assert await sent(scheduler, alone, "a") == ["a"]
        serving = scheduler.extender.serving
        assert serving is not None
        incomplete = "the list of pending pods is not complete yet"
        scheduler.extender._serving = replace(serving, unbound_problem=lambda: incomplete)
        body = json.dumps({"Pod": mine, "NodeNames": ["a"]}).encode()
        status, answer = await scheduler.post("predicates", body)
        assert status == 503
        assert "pending pods is not complete" in answer
        assert await sent(scheduler, alone, "a") == ["a"]
