"""`try` against a scripted API server: what it asks for, says, and takes away."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from agent.check import trial
from agent.check.trial import TrialFailed, TrialOptions, attempt
from agent.cli.main import main
from agent.cluster.api import ApiRefused, KubeApi, Query
from agent.model.modes import Mode
from tests.cluster.rig import REPOSITORY
from tests.component.cluster.scripted import serving
from tests.component.cluster.server import Answer, FakeApi, objects, page, status
from tests.component.kubelet_room.parts import eventually
from tests.virtual_time import in_virtual_time

PODS = "/api/v1/namespaces/team/pods"
POD = f"{PODS}/gpu-node-agent-try-x"
SEEN = "device: /dev/nvidia0\nvariable: NVIDIA_VISIBLE_DEVICES=void\n| SMI |\nnvidia-smi: ended with 0\n"
GONE = status(404, "pods not found")
OFFERED = {"nvidia.com/gpu": "0", "tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "90"}


def node(offered: dict[str, str], **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "n1", "labels": labels}, "status": {"allocatable": offered}}


def pod_object(phase: str, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "x", "annotations": {"tencent.com/predicate-gpu-idx-0": "3", "other": "y"}},
        "spec": {"nodeName": "n1", "containers": [{"name": "agent", "image": "registry/agent:1"}]},
        "status": {"phase": phase, "containerStatuses": [{"state": {}}], **more},
    }


def pod(phase: str, **more: Any) -> Answer:
    return objects(pod_object(phase, **more))


def text(content: str) -> Answer:
    async def answer(_: Any) -> Any:
        from aiohttp import web

        return web.Response(text=content)

    return answer


class Scene:
    def __init__(self, fake: FakeApi, api: Any) -> None:
        self.fake = fake
        self._api = api
        self.said: list[str] = []

    async def attempt(self, **options: Any) -> None:
        await attempt(
            self._api, TrialOptions(namespace="team", **{"image": "busybox", **options}), self.said.append
        )

    @property
    def created(self) -> dict[str, Any]:
        (post,) = self.fake.of(PODS)
        body: dict[str, Any] = post.body
        return body

    @property
    def deleted(self) -> bool:
        return "DELETE" in [each.method for each in self.fake.of(POD)]


@asynccontextmanager
async def scene(*of_pod: Answer, nodes: Answer | None = None) -> AsyncIterator[Scene]:
    async with serving() as (fake, api):
        fake.script("/api/v1/nodes", nodes or page("1", node(OFFERED)))
        fake.script(PODS, objects({}))
        fake.script(POD, *of_pod)
        yield Scene(fake, api)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "x")
    monkeypatch.setattr(trial, "POLL_SECONDS", 0.01)


async def test_a_share_that_was_seen_is_told_and_taken_away() -> None:
    waiting = pod("Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}])
    async with scene(waiting, pod("Running"), pod("Succeeded"), objects({}), GONE) as here:
        here.fake.script(f"{POD}/log", text(SEEN))
        await here.attempt()
    spec = here.created["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {
        "tencent.com/vcuda-core": "10",
        "tencent.com/vcuda-memory": "8",
    }
    assert spec["activeDeadlineSeconds"] == 180
    assert here.deleted
    told = "\n".join(here.said)
    assert "mode vgpu" in told
    assert "pod: 0/1 nodes" in told
    assert "NVIDIA_VISIBLE_DEVICES=void" in told
    assert "annotation: tencent.com/predicate-gpu-idx-0=3" in told
    assert "other" not in told
    assert here.said[-1] == "the share was given on node n1: 1 devices, and nvidia-smi ran"


@pytest.mark.parametrize(
    ("log", "labels", "last"),
    [
        ("device: /dev/nvidia0\nnvidia-smi: not there\n", {}, "the driver brings no nvidia-smi to run"),
        ("nvidia-smi: not there\n", {"gpu-node-agent.io/simulated": "true"}, "its GPUs are simulated"),
    ],
)
async def test_what_is_good_all_the_same(log: str, labels: dict[str, str], last: str) -> None:
    async with scene(pod("Succeeded"), objects({}), GONE, nodes=page("1", node(OFFERED, **labels))) as here:
        here.fake.script(f"{POD}/log", text(log))
        await here.attempt()
    assert last in here.said[-1]


@pytest.mark.parametrize(
    ("phase", "log", "words"),
    [
        (pod("Succeeded"), "nvidia-smi: not there\n", "no device of NVIDIA's: docs/injection.md"),
        (pod("Succeeded"), "device: /dev/nvidia0\nnvidia-smi: ended with 9\n", "nvidia-smi ended with 9"),
        (pod("Failed", reason="DeadlineExceeded"), "", "did not do what it is for: DeadlineExceeded"),
        (
            pod("Failed", containerStatuses=[], reason="UnexpectedAdmissionError", message="no room"),
            "",
            "no room",
        ),
        (
            pod("Pending", containerStatuses=[{"state": {"waiting": {"reason": "InvalidImageName"}}}]),
            "",
            "InvalidImageName",
        ),
    ],
)
async def test_what_went_wrong_is_told_and_the_pod_taken_away(phase: Answer, log: str, words: str) -> None:
    async with scene(phase, objects({}), GONE) as here:
        here.fake.script(f"{POD}/log", text(log))
        with pytest.raises(TrialFailed, match=words):
            await here.attempt()
    assert here.deleted


class Full(KubeApi):
    """An API server in memory whose cluster has no room: the pod waits."""

    def __init__(self, *, deletes: bool) -> None:
        super().__init__(None, None)
        self._deletes = deletes
        self._there = True

    async def get(self, path: str, query: Query = None, deadline: float = 0.0) -> bytes:
        del query, deadline
        if path == "/api/v1/nodes":
            return json.dumps({"items": [node(OFFERED)]}).encode()
        if not self._there:
            raise ApiRefused(404, "pods not found")
        waits = {"type": "PodScheduled", "message": "0/1 nodes"}
        return json.dumps(pod_object("Pending", conditions=[waits])).encode()

    async def post(self, path: str, body: object, deadline: float = 0.0, query: Query = None) -> bytes:
        del path, body, deadline, query
        return b"{}"

    async def delete(self, path: str, query: Query = None, deadline: float = 0.0) -> bytes:
        del path, query, deadline
        self._there = not self._deletes
        return b"{}"


@pytest.mark.parametrize("deletes", [True, False])
@in_virtual_time
async def test_a_pod_that_waits_too_long_is_taken_away(deletes: bool) -> None:
    said: list[str] = []
    options = TrialOptions(namespace="team", image="busybox", seconds=180)
    with pytest.raises(TrialFailed, match=r"after 180 s .* 0/1 nodes"):
        await attempt(Full(deletes=deletes), options, said.append)
    assert any("it is still there after 10 s" in line for line in said) is not deletes


async def test_a_pod_that_cannot_be_taken_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(pod("Succeeded"), status(403, "may not delete")) as here:
        here.fake.script(f"{POD}/log", text(SEEN))
        await here.attempt()
    assert "kubectl -n team delete pod gpu-node-agent-try-x" in "\n".join(here.said)


async def test_nothing_is_taken_away_that_was_refused() -> None:
    async with scene() as here:
        here.fake.scripts[PODS] = [status(403, "quota")]
        with pytest.raises(ApiRefused, match="quota"):
            await here.attempt()
        assert not here.fake.of(POD)


async def test_what_may_have_been_written_is_taken_away() -> None:
    async with scene(objects({}), GONE) as here:
        here.fake.scripts[PODS] = [status(500, "etcdserver: request timed out")]
        with pytest.raises(ApiRefused, match="etcdserver"):
            await here.attempt()
        assert here.deleted


async def test_taking_away_is_tried_again() -> None:
    busy = status(503, "apiserver is shutting down")
    async with scene(pod("Succeeded"), busy, objects({}), busy, GONE) as here:
        here.fake.script(f"{POD}/log", text(SEEN))
        await here.attempt()
        assert [each.method for each in here.fake.of(POD)] == ["GET", "DELETE", "DELETE", "GET", "GET"]
    assert not any("could not be taken away" in line for line in here.said)


async def test_an_api_server_that_is_away_for_a_moment_is_waited_for() -> None:
    async def cut(request: Any) -> Any:
        request.transport.abort()
        await anyio.sleep_forever()

    async with scene(cut, cut, pod("Succeeded"), objects({}), GONE) as here:
        here.fake.script(f"{POD}/log", text(SEEN))
        await here.attempt()
    assert "nvidia-smi ran" in here.said[-1]


async def test_a_cancelled_one_is_taken_away() -> None:
    async with scene(pod("Pending")) as here:
        async with anyio.create_task_group() as group:
            group.start_soon(here.attempt)
            await eventually(lambda: bool(here.fake.of(POD)))
            here.fake.scripts[POD] = [objects({}), GONE]
            group.cancel_scope.cancel()
        assert here.deleted


async def test_a_mode_that_nobody_offers_is_refused_before_any_pod() -> None:
    async with scene() as here:
        with pytest.raises(TrialFailed, match=r"mps-core and .* on any node; .*nvidia-device-enable=mps"):
            await here.attempt(mode=Mode.MPS)
        assert not here.fake.of(PODS)


async def test_whoever_may_not_list_nodes_names_the_mode() -> None:
    refused = status(403, "may not list nodes")
    async with scene(pod("Succeeded"), objects({}), GONE, nodes=refused) as here:
        here.fake.script(f"{POD}/log", text(SEEN))
        with pytest.raises(TrialFailed, match="--mode"):
            await here.attempt()
        await here.attempt(mode=Mode.PGPU, node="n1", runtime_class="nvidia")
    spec = here.created["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert spec["runtimeClassName"] == "nvidia"
    assert "n1" in json.dumps(spec["affinity"])


async def test_the_agent_s_own_image_serves_where_none_is_named() -> None:
    async with scene(pod("Succeeded"), objects({}), GONE) as here:
        here.fake.script("/api/v1/pods", page("1"), page("1", _agent("n2", "a"), _agent("n1", "b")))
        here.fake.script(f"{POD}/log", text(SEEN))
        with pytest.raises(TrialFailed, match="--image"):
            await here.attempt(image=None)
        await here.attempt(image=None, node="n1")
    container = here.created["spec"]["containers"][0]
    assert container["image"] == "b"
    assert container["args"] == ["try", "--inside"]
    assert "command" not in container


def _agent(node: str, image: str) -> dict[str, Any]:
    spec = {"nodeName": node, "containers": [{"name": "agent", "image": image}]}
    return {"metadata": {"name": f"agent-{node}"}, "spec": spec}


async def test_ctrl_c_takes_the_pod_away(tmp_path: Path) -> None:
    """The whole program, as a person runs it."""
    async with scene() as here:
        fake = here.fake
        config = tmp_path / "kubeconfig"
        config.write_text(yaml.safe_dump(_kubeconfig(fake.url)))
        name: list[str] = []

        async def create(request: Any) -> Any:
            path = f"{PODS}/{(await request.json())['metadata']['name']}"
            fake.script(path, pod("Pending"))
            name.append(path)
            return await objects({})(request)

        fake.scripts[PODS] = [create]
        arguments = ["try", "--namespace=team", "--image=busybox", f"--kubeconfig={config}"]
        process = await anyio.open_process(
            [sys.executable, "-m", "agent", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": "."},
            # Pipes that nobody reads stay open until they are collected.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await eventually(lambda: bool(name) and len(fake.of(name[0])) > 1)
            fake.scripts[name[0]] = [objects({}), GONE]
            process.send_signal(signal.SIGINT)
            with anyio.fail_after(30):
                assert await process.wait() == 130
        finally:
            if process.returncode is None:
                process.kill()
            await process.aclose()
        assert "DELETE" in [each.method for each in fake.of(name[0])]


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }


@pytest.mark.parametrize("name", ["", "a/b", "../../x", "team?dryRun=All", "Team", "-x", "a" * 64])
def test_a_namespace_that_cannot_be_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["try", f"--namespace={name}", "--kubeconfig=/nonexistent"])
    assert ended.value.code == 2
    assert "is no name of a namespace" in capsys.readouterr().err
