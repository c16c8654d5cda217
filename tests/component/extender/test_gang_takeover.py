"""The leader ends at any step of a gang: what it kept for the members is kept by the next one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agent.extender import gangs
from agent.model.placement import HINT
from tests.component.extender.api import ClusterApi, Object
from tests.component.extender.api import gpus as gpus_of
from tests.component.extender.replicas import Scheduler, leader, replica
from tests.component.extender.test_gangs import member, sent

RECORD = "gpu-node-agent-extender-gangs"
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


@asynccontextmanager
async def killed(api: ClusterApi, **flags: Any) -> AsyncIterator[Scheduler]:
    """A leader that ends without giving up its lease, whose time is over soon after."""
    async with leader(api, **flags) as made:
        yield made
        api.leases_work = False
    api.leases_work = True
    api.leases.clear()


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("orderly", [False, True], ids=["killed", "handed over"])
async def test_gang_is_not_half_bound(step: int, orderly: bool) -> None:
    """Somebody else asks for the GPUs after each change of the leader, and before each binding."""
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    gang = [member(api, f"member-{number}", cores=60) for number in range(2)]
    steps = [
        (filtered, 0),
        (filtered, 1),
        (asked_by_another, 0),
        (bound, 0),
        (asked_by_another, 1),
        (bound, 1),
    ]
    async with api.serving():
        async with (leader if orderly else killed)(api) as scheduler:
            for act, number in steps[:step]:
                await act(api, scheduler, gang[number])
        async with leader(api) as scheduler:
            if step:
                await nobody_else(api, scheduler, all_kept=step > 1)
            for act, number in steps[step:]:
                await act(api, scheduler, gang[number])
        taken = [one["metadata"]["annotations"][f"{HINT}0"] for one in api.bindings]
        assert sorted(taken) == ["0", "1"]


async def filtered(api: ClusterApi, scheduler: Scheduler, pod: Object) -> None:
    assert await sent(scheduler, pod, "a") == ["a"]


async def bound(api: ClusterApi, scheduler: Scheduler, pod: Object) -> None:
    assert await scheduler.bind(pod, "a") == ""


async def asked_by_another(api: ClusterApi, scheduler: Scheduler, pod: Object) -> None:
    await nobody_else(api, scheduler, all_kept=True)


async def nobody_else(api: ClusterApi, scheduler: Scheduler, *, all_kept: bool) -> None:
    """Another pod gets no GPU of the gang's by filter, nor by bind."""
    other = api.pod("other", 60, 10)
    assert await sent(scheduler, other, "a") == ([] if all_kept else ["a"])
    if all_kept:
        assert "no room any more" in await scheduler.bind(other, "a")
    api.end("other")


async def test_a_member_whose_binding_failed_finds_its_gpus_at_the_next_leader() -> None:
    """kube-scheduler asks an address where nobody serves, and filters the pod again."""
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    gang = [member(api, f"member-{number}", cores=60) for number in range(2)]
    for pod in gang:  # it waited for long before there was room
        pod["status"]["conditions"] = [UNSCHEDULABLE]
        api.update(pod)
    async with api.serving():
        async with killed(api) as scheduler:
            for pod in gang:
                assert await sent(scheduler, pod, "a") == ["a"]
            assert await scheduler.bind(gang[0], "a") == ""
        async with leader(api, gangSeconds=600) as scheduler:
            fleet = scheduler.extender.fleet
            assert fleet is not None
            with anyio.fail_after(10):
                while not (kept := fleet.assumed("member-1")):
                    await anyio.sleep(0.01)
            # The condition is older than the choice, which lasts as any.
            assert kept.expires - anyio.current_time() > 300
            assert await sent(scheduler, gang[1], "a") == ["a"]
            assert await scheduler.bind(gang[1], "a") == ""


async def test_what_is_kept_no_longer_leaves_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "TIDY_SECONDS", 0.05)
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    first, second = (member(api, name, cores=60) for name in ("first", "second"))
    async with api.serving():
        async with killed(api) as scheduler:
            for pod in (first, second):
                assert await sent(scheduler, pod, "a") == ["a"]
            assert api.config_maps[RECORD]["data"].keys() == {"first", "second"}
            assert await scheduler.bind(first, "a") == ""
            await until_recorded(api, {"second"})
        api.end("second")  # while nobody leads
        api.config_maps[RECORD]["data"] |= {"odd": "no JSON", "gone": '{"node": "a", "chosen": [[0]]}'}
        async with leader(api) as scheduler:
            await until_recorded(api, set())
            assert await sent(scheduler, api.pod("other", 60, 10), "a") == ["a"]


async def until_recorded(api: ClusterApi, uids: set[str]) -> None:
    with anyio.fail_after(10):
        while api.config_maps[RECORD].get("data", {}).keys() != uids:
            await anyio.sleep(0.02)


async def test_a_choice_that_cannot_be_recorded_is_no_answer() -> None:
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    async with api.serving(), leader(api) as scheduler:
        pod = member(api, "member", cores=60)
        api.config_maps_answer = 500
        status, text = await scheduler.post("predicates", {"Pod": pod, "NodeNames": ["a"]})
        assert status == 503
        assert "could not be recorded" in text
        api.config_maps_answer = 0
        assert await sent(scheduler, pod, "a") == ["a"]
        assert api.config_maps[RECORD]["data"].keys() == {"member"}


async def test_a_record_that_somebody_deletes_is_made_again_with_all_that_is_kept() -> None:
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    first, second = (member(api, name, cores=60) for name in ("first", "second"))
    async with api.serving(), leader(api) as scheduler:
        assert await sent(scheduler, first, "a") == ["a"]
        api.config_maps.clear()
        status, text = await scheduler.post("predicates", {"Pod": second, "NodeNames": ["a"]})
        assert (status, "it was made again" in text) == (503, True)
        assert await sent(scheduler, second, "a") == ["a"]
        assert api.config_maps[RECORD]["data"].keys() == {"first", "second"}


async def test_without_the_right_to_record_gangs_are_served_as_before() -> None:
    api = ClusterApi(config_maps_answer=403)
    api.node("a", *gpus_of(2))
    async with api.serving(), leader(api) as scheduler:
        pod = member(api, "member", cores=60)
        assert await sent(scheduler, pod, "a") == ["a"]
        assert await scheduler.bind(pod, "a") == ""


async def test_nothing_is_served_before_the_record_is_read() -> None:
    api = ClusterApi()
    api.node("a", *gpus_of(2))
    gang = [member(api, f"member-{number}", cores=60) for number in range(2)]
    async with api.serving():
        async with killed(api) as scheduler:
            for pod in gang:
                assert await sent(scheduler, pod, "a") == ["a"]
        api.config_maps_answer = 500
        async with replica(api) as scheduler:
            with anyio.fail_after(10):
                while "kept for gangs cannot be read" not in (await scheduler.get("/serving"))[1]:
                    await anyio.sleep(0.02)
            api.config_maps_answer = 0
            await scheduler.ready()
            assert await sent(scheduler, api.pod("other", 60, 10), "a") == []
