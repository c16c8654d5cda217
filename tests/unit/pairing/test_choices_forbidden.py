"""Choices that the API server answers with 403: one pod's refusal, or a right that the agent lacks."""

import json
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable
from agent.cluster.reviews import PATH, lacks_right
from agent.model.pod import Container, Metadata, Pod
from agent.pairing.cluster_pods import DENIED_LONGEST_SECONDS, DENIED_SECONDS, ClusterRecorder
from tests.pods import a_pod
from tests.virtual_time import in_virtual_time

FORBIDDEN = ApiRefused(403, "pods is forbidden")


class Api:
    """An API server with an account that may patch pods or not, and a webhook that refuses some of them."""

    def __init__(self) -> None:
        self.granted = True
        self.refused: set[str] = set()  # names of pods
        self.review: ApiError | bytes | None = None  # the answer about rights; None: the true one
        self.tried: list[tuple[float, str]] = []  # time, name
        self.written: dict[str, dict[str, str]] = {}
        self.asked: list[Any] = []

    async def merge_patch(self, path: str, body: Any) -> bytes:
        name = path.rpartition("/")[2]
        self.tried.append((anyio.current_time(), name))
        if not self.granted or name in self.refused:
            raise FORBIDDEN
        self.written.setdefault(name, {}).update(body["metadata"]["annotations"])
        return b"{}"

    async def post(self, path: str, body: Any) -> bytes:
        assert path == PATH
        self.asked.append(body["spec"]["resourceAttributes"])
        if isinstance(self.review, ApiError):
            raise self.review
        return self.review or json.dumps({"status": {"allowed": self.granted}}).encode()


class Rig:
    def __init__(self) -> None:
        self.api = Api()
        self.recorder = ClusterRecorder(self.api, None, True)  # type: ignore[arg-type]

    def choose(self, name: str, container: str = "a", *, last: bool = True) -> None:
        pod = a_pod("ns", name, (Container("a"), Container("b")), uid=f"uid-{name}")
        self.recorder.chosen(pod, container, [1], last=last)


CHOICE = {"tencent.com/predicate-gpu-idx-0": "1", "tencent.com/gpu-assigned": "true"}
Logs = list[dict[str, Any]]


@pytest.mark.parametrize("review", [None, ApiRefused(404, "not found"), ApiUnavailable("away"), b"{", b"{}"])
@in_virtual_time
async def test_a_refusal_of_one_pod_leaves_the_others_alone(
    review: ApiError | bytes | None, logs: Logs
) -> None:
    """Also where nobody says whether the agent's account may patch pods."""
    rig = Rig()
    rig.api.review, rig.api.refused = review, {"p1", "p2", "p3", "p4"}
    for number in range(6):
        rig.choose(f"p{number}")
    async with anyio.create_task_group() as group:
        group.start_soon(rig.recorder.run)
        await anyio.sleep(1)
        assert rig.api.written == {"p0": CHOICE, "p5": CHOICE}
        assert len(rig.api.tried) == 6
        assert len(rig.api.asked) == 1
        await anyio.sleep(DENIED_SECONDS)
        rig.choose("p4", "b")
        await anyio.sleep(1)
        assert len(rig.api.asked) == 2
        group.cancel_scope.cancel()
    assert [each["log_level"] for each in logs if each["event"] == "choice_not_written"] == ["info"] * 5


@in_virtual_time
async def test_choices_wait_while_the_right_is_lacking(logs: Logs) -> None:
    rig = Rig()
    rig.api.granted = False
    rig.choose("p0", last=False)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.recorder.run)
        await anyio.sleep(1)
        assert rig.api.asked == [{"namespace": "ns", "verb": "patch", "resource": "pods"}]
        rig.choose("p1")
        rig.choose("p0", "b")
        await anyio.sleep(DENIED_SECONDS * 0.7)
        assert len(rig.api.tried) == 1
        await anyio.sleep(3600)
        pauses = [later - earlier for (earlier, _), (later, _) in pairwise(rig.api.tried)]
        assert all(DENIED_SECONDS * 0.8 <= each <= DENIED_LONGEST_SECONDS for each in pauses)
        assert pauses[-1] >= DENIED_LONGEST_SECONDS * 0.8
        assert {name for _, name in rig.api.tried} == {"p0", "p1"}  # each in turn
        rig.api.granted = True
        await anyio.sleep(DENIED_LONGEST_SECONDS)
        assert rig.api.written == {"p0": CHOICE | {"tencent.com/predicate-gpu-idx-1": "1"}, "p1": CHOICE}
        group.cancel_scope.cancel()
    said = [(each["event"], each["log_level"]) for each in logs]
    assert said == [("choice_not_written", "warning"), ("choices_written_again", "info")]
    assert logs[0]["remedy"] == "grant patch on pods"


@in_virtual_time
async def test_a_right_that_is_lacking_again_is_said_again(logs: Logs) -> None:
    rig = Rig()
    async with anyio.create_task_group() as group:
        group.start_soon(rig.recorder.run)
        for number in range(2):
            rig.api.granted = False
            rig.choose(f"p{number}")
            await anyio.sleep(1)
            rig.api.granted = True
            await anyio.sleep(DENIED_SECONDS)
        assert set(rig.api.written) == {"p0", "p1"}
        group.cancel_scope.cancel()
    assert [each["event"] for each in logs] == ["choice_not_written", "choices_written_again"] * 2


@pytest.mark.parametrize(("granted", "lacks"), [(True, False), (False, True)])
async def test_the_server_is_asked_for_a_right(granted: bool, lacks: bool) -> None:
    api = Api()
    api.granted = granted
    assert await lacks_right(api, "patch", "pods", "ns") is lacks  # type: ignore[arg-type]


@in_virtual_time
async def test_choices_that_wait_keep_no_whole_pods() -> None:
    rig, freed = Rig(), 0
    rig.api.granted = False

    class Watched(Pod, frozen=True):
        def __del__(self) -> None:
            nonlocal freed
            freed += 1

    async with anyio.create_task_group() as group:
        group.start_soon(rig.recorder.run)
        for number in range(20):
            pod = Watched(Metadata(f"p{number}", "ns", f"uid-{number}"))
            rig.recorder.annotate(pod, {"note": "x"})
            await anyio.lowlevel.checkpoint()
        del pod
        await anyio.sleep(DENIED_SECONDS / 2)
        assert freed == 20
        rig.api.granted = True
        await anyio.sleep(DENIED_SECONDS)
        assert len(rig.api.written) == 20
        group.cancel_scope.cancel()
