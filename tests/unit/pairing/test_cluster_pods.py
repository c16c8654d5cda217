"""Pods and their owners by way of the Kubernetes API: what is read of a pod, and what is written back."""

import json
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pytest

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable
from agent.cluster.event_recorder import Event
from agent.cluster.pods import HASH_ANNOTATION, CgroupUids
from agent.cluster.reflector import Reflector
from agent.model.pod import Container, Pod, PodSpec, Stage
from agent.pairing import cluster_pods
from agent.pairing.cluster_pods import ClusterPods, ClusterRecorder
from agent.pairing.pod_source import PodsUnavailable
from tests.pods import a_pod, changed


def api_pod(uid: str = "u", **metadata: object) -> Pod:
    limits = {"cpu": "500m", "tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "1k", "x/y": "0.5"}
    document = {
        "metadata": {"name": "p", "namespace": "ns", "uid": uid, "annotations": {"a": "b"}, **metadata},
        "spec": {
            "initContainers": [{"name": "init"}, {"name": "sidecar", "restartPolicy": "Always"}],
            "containers": [{"name": "main", "resources": {"limits": limits}}, {"name": "second"}],
        },
        "status": {"phase": "Running"},
    }
    return msgspec.json.decode(json.dumps(document).encode(), type=Pod)


class Cache:
    """A watch cache with what a test puts in."""

    node = "node1"

    def __init__(self) -> None:
        self.items: dict[str, Pod] = {}
        self.problem: Exception | None = None

    def pods(self) -> dict[str, Pod]:
        return self.items

    async def get(self, namespace: str, name: str) -> Pod | None:
        if self.problem:
            raise self.problem
        return next((pod for pod in self.items.values() if pod.metadata.name == name), None)


def test_a_pod_is_read_in_the_order_of_its_admission() -> None:
    pod = api_pod()
    assert pod.key == ("ns", "p")
    assert (pod.uid, pod.status.phase, pod.ending, pod.annotations) == ("u", "Running", False, {"a": "b"})
    assert [(each.name, each.stage) for each in pod.containers] == [
        ("init", Stage.INIT),
        ("sidecar", Stage.SIDECAR),
        ("main", Stage.APP),
        ("second", Stage.APP),
    ]
    # What is no whole number of units is nobody's device.
    assert pod.containers[2].limits == {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 1000}


def test_a_pod_under_deletion_is_ending() -> None:
    assert api_pod(deletionTimestamp="2026-01-01T00:00:00Z").ending


def test_pods_are_converted_once_per_change() -> None:
    cache = Cache()
    source = ClusterPods(cache)  # type: ignore[arg-type]
    cache.items = {"u": api_pod()}
    (first,), (again,) = source.pods_on_node(), source.pods_on_node()
    assert first is again
    cache.items = {"u": api_pod(annotations={"a": "c"})}
    (changed,) = source.pods_on_node()
    assert changed.annotations == {"a": "c"}
    cache.items = {}
    assert not source.pods_on_node()


async def test_an_api_that_is_away_is_told_apart_from_a_pod_that_is_not_there() -> None:
    cache = Cache()
    source = ClusterPods(cache)  # type: ignore[arg-type]
    assert await source.get("ns", "p") is None
    cache.problem = ApiUnavailable("connection refused")
    with pytest.raises(PodsUnavailable, match="connection refused"):
        await source.get("ns", "p")
    # One that restarts is waited for; one that answers with nothing of use is not.
    for problem, away in (
        (cache.problem, True),
        (ApiRefused(503, "starting"), True),
        (ApiRefused(429, "too many"), True),
        (ApiRefused(403, "forbidden"), False),
        (ApiError("another object"), False),
    ):
        cache.problem = problem
        with pytest.raises(PodsUnavailable) as raised:
            await source.get("ns", "p")
        assert raised.value.away is away


@pytest.mark.parametrize("node", ["", "node1", "node2"])
async def test_a_pod_that_is_not_bound_to_this_node_is_nobody_who_asks(node: str) -> None:
    """Storm 1000109: the next of a name, after a deletion by force, while the kubelet lists the first."""
    pod = msgspec.structs.replace(api_pod("next"), spec=PodSpec(node_name=node))

    class Answering(Cache):
        async def get(self, namespace: str, name: str) -> Pod | None:
            return pod

        fetch = get

    source = ClusterPods(Answering())  # type: ignore[arg-type]
    expected = pod if node == "node1" else None
    assert [await source.get("ns", "p"), await source.fetch("ns", "p")] == [expected] * 2


class Api:
    """An API server that remembers patches, and may refuse them."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.patches: list[tuple[str, Any]] = []
        self.refusal = refusal

    async def merge_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
        self.patches.append((path, body))
        if self.refusal:
            raise self.refusal
        return b"{}"


class Events:
    def __init__(self) -> None:
        self.emitted: list[Event] = []

    def emit(self, event: Event) -> None:
        self.emitted.append(event)


POD = a_pod("ns", "p", (Container("init", {}, Stage.INIT), Container("a"), Container("b")), uid="u")


async def recorded(api: Api, *choices: tuple[str, list[int]], write: bool = True) -> None:
    recorder = ClusterRecorder(api, Events(), write)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        for container, indices in choices:
            recorder.chosen(POD, container, indices, last=container == "b")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


async def test_the_choice_is_written_by_number_of_the_container() -> None:
    api = Api()
    await recorded(api, ("init", [0]), ("a", [0]), ("b", [3, 5]))
    annotations = {
        "tencent.com/predicate-gpu-idx-2": "0",  # init containers are counted after the app containers
        "tencent.com/predicate-gpu-idx-0": "0",
        "tencent.com/predicate-gpu-idx-1": "3,5",
        "tencent.com/gpu-assigned": "true",
    }
    body = {"metadata": {"uid": "u", "annotations": annotations}}
    assert api.patches == [("/api/v1/namespaces/ns/pods/p", body)]


async def test_a_choice_is_assigned_with_the_last_container() -> None:
    api = Api()
    await recorded(api, ("a", [1]))
    body = {"metadata": {"uid": "u", "annotations": {"tencent.com/predicate-gpu-idx-0": "1"}}}
    assert api.patches == [("/api/v1/namespaces/ns/pods/p", body)]


async def test_nothing_is_written_when_it_is_not_wanted() -> None:
    api = Api()
    await recorded(api, ("a", [1]), write=False)
    assert api.patches == []


async def test_choice_patch_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    api = Api(ApiUnavailable("away"))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            api.refusal = None
        elif len(pauses) == 2:
            recorder.chosen(POD, "b", [2], last=True)  # meanwhile: it comes with the same patch
            api.refusal = ApiRefused(503, "busy")
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr("agent.pairing.cluster_pods.anyio.sleep", sleep)
    recorder = ClusterRecorder(api, Events(), True)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        recorder.chosen(POD, "a", [1], last=False)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(pauses) == 3
    assert pauses[0] < pauses[2]
    assert [body["metadata"]["annotations"] for _, body in api.patches] == [
        *[{"tencent.com/predicate-gpu-idx-0": "1"}] * 2,
        *[
            {
                "tencent.com/predicate-gpu-idx-0": "1",
                "tencent.com/predicate-gpu-idx-1": "2",
                "tencent.com/gpu-assigned": "true",
            }
        ]
        * 2,
    ]


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_choice_that_was_refused_comes_along_with_the_next(meanwhile: bool) -> None:
    """Else `gpu-assigned` would say that all choices stand there."""
    recorder: ClusterRecorder

    class Refusing(Api):
        async def merge_patch(self, path: str, body: object, deadline: float = 5.0) -> bytes:
            if meanwhile and not self.patches:
                recorder.chosen(POD, "b", [2], last=True)
            return await super().merge_patch(path, body, deadline)

    api = Refusing(ApiRefused(409, "the object has been modified"))
    recorder = ClusterRecorder(api, Events(), True)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        recorder.chosen(POD, "a", [1], last=False)
        await anyio.wait_all_tasks_blocked()
        if not meanwhile:
            assert len(api.patches) == 1  # it is not tried again by itself
            recorder.chosen(POD, "b", [2], last=True)
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert [body["metadata"]["annotations"] for _, body in api.patches] == [
        {"tencent.com/predicate-gpu-idx-0": "1"},
        {
            "tencent.com/predicate-gpu-idx-0": "1",
            "tencent.com/predicate-gpu-idx-1": "2",
            "tencent.com/gpu-assigned": "true",
        },
    ]


async def test_only_so_many_refused_choices_are_kept() -> None:
    api = Api(ApiRefused(422, "invalid"))
    recorder = ClusterRecorder(api, Events(), True)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        for number in range(cluster_pods.WAITING_PATCHES + 5):
            recorder.chosen(changed(POD, uid=f"u{number}"), "a", [1], last=False)
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(recorder._refused) == cluster_pods.WAITING_PATCHES


async def test_a_pod_that_is_gone_is_not_written_to_again() -> None:
    api = Api(ApiRefused(404, "not found"))
    await recorded(api, ("a", [1]))
    assert len(api.patches) == 1


async def test_only_so_many_choices_wait() -> None:
    api = Api()
    recorder = ClusterRecorder(api, Events(), True)  # type: ignore[arg-type]
    for number in range(cluster_pods.WAITING_PATCHES + 5):
        recorder.chosen(changed(POD, uid=f"u{number}"), "a", [1], last=False)
    async with anyio.create_task_group() as group:
        group.start_soon(recorder.run)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(api.patches) == cluster_pods.WAITING_PATCHES
    assert api.patches[0][1]["metadata"]["uid"] == "u5"


def test_refusals_and_ignored_hints_become_warnings_on_the_pod() -> None:
    events = Events()
    recorder = ClusterRecorder(Api(), events, True)  # type: ignore[arg-type]
    recorder.refused(POD, "no room")
    recorder.hint_ignored(POD, "GPU 3 is full")
    assert [(each.reason, each.message, each.warning, each.regarding.uid) for each in events.emitted] == [
        ("AllocationRefused", "no room", True, "u"),
        ("PlacementHintIgnored", "GPU 3 is full", True, "u"),
    ]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("answer", "over"),
    [
        (None, True),
        (api_pod("next"), True),
        (api_pod("u"), False),
        (changed(api_pod("u"), phase="Succeeded"), True),
        (changed(api_pod("next"), annotations={HASH_ANNOTATION: "u"}), False),
        (ApiUnavailable("away"), False),
    ],
    ids=["gone", "replaced", "there", "finished", "a mirror of it", "no answer"],
)
async def test_a_pod_is_over_by_the_answer_to_a_question_ahead_of_the_watch(
    answer: Pod | Exception | None, over: bool, *, listed: bool
) -> None:
    """But for one without an object that the kubelet lists: it was deleted by force, and runs."""
    over = over and not (listed and answer is None)
    asked: list[tuple[str, str]] = []

    class Kept(Cache):
        """A mute watch, which shows the pod."""

        reflector = Reflector(cast("Any", None), "", {}, Pod, "pods")

        def cgroup_uids(self) -> CgroupUids[Pod]:
            return CgroupUids({**self.items, "hash": api_pod("mirror")}, frozenset({"contested"}))

        async def fetch(self, namespace: str, name: str) -> Pod | None:
            asked.append((namespace, name))
            if isinstance(answer, Exception):
                raise answer
            return answer

    cache = Kept()
    cache.items = {"u": api_pod("u")}
    source = ClusterPods(cache)  # type: ignore[arg-type]
    # Of a static pod the API server knows a mirror alone, which anybody may delete.
    unseen = "0123456789abcdef" * 2  # of a static pod whose mirror the watch has not shown
    others = {"hash": ("ns", "static"), "contested": ("ns", "q"), unseen: ("ns", "r")}
    await source.ask_after({"u": ("ns", "p"), **others}, [("ns", "p")] if listed else [])
    assert asked == [("ns", "p")]
    view = source.view()
    assert (view.ended("u"), "u" in view.pods) == (over, not over)
    assert not view.ended("contested")
    assert not view.complete
