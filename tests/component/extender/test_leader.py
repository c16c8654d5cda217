"""Two replicas: one serves, the other takes over with a ledger from the watch alone."""

import json

import aiohttp
import anyio

from agent.extender.app import running
from agent.extender.lease import LABEL, ServingLabel
from agent.extender.pending_pods import UNBOUND
from agent.extender.settings import Serving
from agent.kit.tasks import Cell
from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import leader, replica, settings_for

HINT = "tencent.com/predicate-gpu-idx-0"
# For tests of a lease that ends: it may end at other times, too, where the machine is busy.
QUICK = {"lease.durationSeconds": 3, "lease.renewSeconds": 2}


async def test_a_standby_is_ready_and_answers_no_verb() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api), replica(api) as second:
        with anyio.fail_after(10):
            while (await second.get("/readyz"))[0] != 200:
                await anyio.sleep(0.05)
        status, text = await second.get("/serving")
        assert status == 503
        assert "another replica leads" in text
        assert (await second.get("/healthz"))[0] == 200
        status, text = await second.post("predicates", {"Pod": api.pod("p", 1, 1), "NodeNames": ["a"]})
        assert (status, "not the leader" in text) == (503, True)


async def test_a_standby_without_an_api_server_is_not_ready() -> None:
    api = ClusterApi()
    async with api.serving(), replica(api, **QUICK) as scheduler:
        await scheduler.ready()
        api.leases_work = False
        with anyio.fail_after(15):
            while (await scheduler.get("/readyz"))[0] == 200:
                await anyio.sleep(0.1)
        _, text = await scheduler.get("/readyz")
        assert "the election has stood still" in text
        assert "no storage" in text
        api.leases_work = True
        with anyio.fail_after(10):
            while (await scheduler.get("/readyz"))[0] != 200:
                await anyio.sleep(0.1)


async def test_the_label_of_the_service_moves_with_leadership() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    of_the_release = {"app.kubernetes.io/component": "extender"}
    for name in ("first", "second"):
        api.pod(name, 0, 0, "n", labels=dict(of_the_release))
    # A leader that died keeps its label; a pod of something else has it, too.
    api.pod("dead", 0, 0, "n", labels=of_the_release | {LABEL: "true"})
    api.pod("foreign", 0, 0, "n", labels={LABEL: "true"})

    def labelled() -> set[str]:
        return {name for name, pod in api.pods.items() if LABEL in pod["metadata"].get("labels", {})}

    async def labels(*names: str) -> None:
        with anyio.fail_after(10):
            while labelled() != {"foreign", *names}:
                await anyio.sleep(0.02)

    def own(name: str) -> dict[str, str]:
        return {"serving.pod": name, "serving.selector": "app.kubernetes.io/component=extender"}

    async with api.serving():
        async with replica(api, **own("first")) as first:
            await first.ready()
            await labels("first")
            assert [name for name, _ in api.label_writes] == ["dead", "first"]
            async with replica(api, **own("second")) as second:
                api.leases["gpu-node-agent-extender"]["spec"]["holderIdentity"] = "second"
                first.extender.election._until = float("-inf")
                first.extender.election.leading.publish(False)
                await labels()
                api.leases["gpu-node-agent-extender"]["spec"]["holderIdentity"] = ""
                with anyio.fail_after(10):
                    while not (first.extender.serving or second.extender.serving):
                        await anyio.sleep(0.02)
                await labels("first" if first.extender.serving else "second")
        await labels()  # who ends gives it back


async def test_a_leader_whose_label_cannot_be_written_does_not_say_that_it_serves() -> None:
    api = ClusterApi(labels_work=False)
    api.node("a", *gpus(1))
    api.pod("first", 0, 0, "n")
    async with api.serving(), replica(api, **{"serving.pod": "first"}) as scheduler:
        with anyio.fail_after(10):
            while scheduler.extender.serving is None or scheduler.extender.blockers() == []:
                await anyio.sleep(0.02)
        status, text = await scheduler.get("/serving")
        assert status == 503
        assert "the Service does not find it" in text
        assert "the policy forbids it" in text
        assert "gpu_agent_extender_ready 0.0" in (await scheduler.get("/metrics"))[1]
        assert (await scheduler.get("/readyz"))[0] == 200  # it could take over
        api.labels_work = True
        with anyio.fail_after(10):
            while (await scheduler.get("/serving"))[0] != 200:
                await anyio.sleep(0.1)
        assert "gpu_agent_extender_ready 1.0" in (await scheduler.get("/metrics"))[1]


async def test_a_leader_that_lost_its_lease_takes_no_label_from_its_successor() -> None:
    api = ClusterApi()
    for name in ("former", "successor"):
        api.pod(name, 0, 0, "n", labels={LABEL: "true"})
    async with api.serving(), api.client() as client, anyio.create_task_group() as group:
        label = ServingLabel(client, Serving(), "former", "ns", lambda: False)
        group.start_soon(label.keep, Cell(True))
        with anyio.fail_after(10):
            while not api.label_writes:
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    assert {name for name, _ in api.label_writes} == {"former"}
    assert api.pods["successor"]["metadata"]["labels"] == {LABEL: "true"}


async def test_an_orderly_end_hands_over_at_once_and_nothing_is_sold_twice() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), replica(api) as second:
        # A follower by chance first: the leader is stopped.
        await second.ready()
        async with replica(api) as third:
            assert await second.bind(api.pod("p", 60, 10), "a") == ""
            second.extender.election.leading.publish(False)
            await second.extender.election._release()
            with anyio.fail_after(5):
                while third.extender.serving is None and second.extender.serving is None:
                    await anyio.sleep(0.02)
            now = third if third.extender.serving else second
            assert await now.bind(api.pod("q", 60, 10), "a") == ""
            assert "largest free share" in await now.bind(api.pod("r", 60, 10), "a")
    assert [binding["metadata"]["annotations"][HINT] for binding in api.bindings] == ["0", "1"]


async def test_a_leader_that_cannot_renew_stops_serving() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api, **QUICK) as scheduler:
        api.leases_work = False
        with anyio.fail_after(6):
            while scheduler.extender.serving is not None:
                await anyio.sleep(0.05)
        status, _ = await scheduler.post("predicates", {"Pod": api.pod("p", 1, 1), "NodeNames": ["a"]})
        assert status == 503
        api.leases_work = True
        await scheduler.ready()


async def test_a_dead_leaders_lease_is_taken_over_after_its_duration() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    version = {"name": "gpu-node-agent-extender", "resourceVersion": "1"}
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 1, "leaseTransitions": 4}
    api.leases["gpu-node-agent-extender"] = {"metadata": version, "spec": spec}
    async with api.serving(), leader(api) as scheduler:
        lease = api.leases["gpu-node-agent-extender"]["spec"]
        assert lease["holderIdentity"] == scheduler.extender.election.identity
        assert lease["leaseTransitions"] == 5


async def test_it_is_not_ready_before_both_lists_are_complete() -> None:
    api = ClusterApi()
    api.pods_listed.publish(False)
    async with api.serving(), replica(api) as scheduler:
        with anyio.fail_after(5):
            while not (scheduler.extender.sync and scheduler.extender.sync.nodes.synced):
                await anyio.sleep(0.02)
        assert await scheduler.get("/serving") == (503, "the list of bound pods is not complete yet\n")
        status, _ = await scheduler.post("predicates", {"Pod": api.pod("p", 1, 1), "NodeNames": ["a"]})
        assert status == 503
        api.pods_listed.publish(True)
        await scheduler.ready()


async def test_what_keeps_a_ledgers_memory_runs_beside_each_ledger_and_no_longer() -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    kept: list[str] = []

    async def keep(complete: Cell[bool]) -> None:
        try:
            await complete.wait_for(bool)
            kept.append("complete")
            await anyio.sleep_forever()
        finally:
            kept.append("dropped")

    async with (
        api.serving(),
        api.client() as connected,
        running(settings_for(**QUICK), connected, keep) as extender,
    ):
        with anyio.fail_after(20):
            while kept[:1] != ["complete"]:
                await anyio.sleep(0.05)
            api.leases_work = False
            while extender.sync is not None:
                await anyio.sleep(0.05)
            assert kept == ["complete", "dropped"]
            api.leases_work = True
            while kept[2:] != ["complete"]:
                await anyio.sleep(0.05)


async def test_the_doubles_watch_of_unbound_pods_begins_with_those_alone() -> None:
    """As an API server's: 50,000 bound ones that it sent as deleted fell into figures of the bench."""
    api = ClusterApi()
    api.pod("bound", 1, 1, "a")
    api.pod("unbound", 1, 1)
    async with api.serving(), aiohttp.ClientSession() as http:
        query = {"watch": "true", "fieldSelector": UNBOUND}
        async with http.get(f"{api.url}/api/v1/pods", params=query) as reply:
            with anyio.fail_after(5):
                shown = [json.loads(await reply.content.readline()) for _ in range(2)]
    assert [(each["type"], each["object"]["metadata"].get("name")) for each in shown] == [
        ("ADDED", "unbound"),
        ("BOOKMARK", None),
    ]
