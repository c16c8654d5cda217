"""All members of a gang are filtered before one is bound: each has GPUs of its own, or is not sent."""

import anyio

from agent.extender.objects import GROUP_LABEL
from agent.model.placement import HINT
from tests.component.extender.api import ClusterApi, Object, gpus
from tests.component.extender.replicas import Scheduler, leader


def member(api: ClusterApi, name: str, group: str = "gang", cores: int = 40) -> Object:
    made = api.pod(name, cores, 10)
    made["spec"]["schedulingGroup"] = {"podGroupName": group}
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


async def test_a_gang_that_was_refused_keeps_little_for_long() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        first, second = (member(api, name, cores=60) for name in ("first", "second"))
        assert await sent(scheduler, first, "a") == ["a"]
        assert await sent(scheduler, second, "a") == []
        with anyio.fail_after(20):  # five seconds, by the gang's refusal, not sixty
            while await sent(scheduler, api.pod("other", 60, 10), "a") != ["a"]:
                await anyio.sleep(0.5)


async def test_groups_of_the_coscheduling_plugin_are_gangs_too() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        gang = [api.pod(name, 60, 10, labels={GROUP_LABEL: "gang"}) for name in ("first", "second")]
        assert [await sent(scheduler, pod, "a") for pod in gang] == [["a"], []]
        alone = [api.pod(name, 30, 10) for name in ("third", "fourth")]
        assert [await sent(scheduler, pod, "a") for pod in alone] == [["a"], ["a"]]
