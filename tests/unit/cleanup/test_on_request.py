"""An agent's answers, and the times at which it leaves service or comes back."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from agent.cleanup import on_request
from agent.cleanup import this_node as node_files
from agent.cleanup.on_request import Requests, Standby
from agent.cleanup.request import (
    LONGEST_SECONDS,
    NOTHING,
    REPORT,
    CleanupFailed,
    CleanupRefused,
    CleanupReport,
    CleanupRequest,
    CleanupState,
    asking,
    taking_back,
)
from agent.cluster.api import ApiUnavailable, KubeApi
from agent.cluster.node import ApiNode
from agent.cluster.node import OwnNode as RealNode
from agent.model.pod import Metadata
from agent.settings import Settings

NOBODY: Any = None  # Obstacles have the pods
NOW = datetime(2026, 11, 22, 8, tzinfo=UTC)


class OwnNode(RealNode):
    """A node object that shows its own patches at once, as a watch does a moment later."""

    def __init__(self) -> None:
        super().__init__(KubeApi(None, None), "node1")
        self.notes: dict[str, str] = {}
        self.failing = 0
        self.publish()

    def publish(self) -> None:
        made = ApiNode(Metadata(name="node1", uid="u", annotations=dict(self.notes)))
        self.reflector.items.publish(MappingProxyType({"u": made}))

    def set(self, annotations: Any) -> None:
        merged = {**self.notes, **annotations}
        self.notes = {key: value for key, value in merged.items() if value is not None}
        self.publish()

    async def write_metadata(self, labels: Any, annotations: Any) -> None:
        """Annotations alone."""
        assert not labels
        await anyio.lowlevel.checkpoint()
        if self.failing:
            self.failing -= 1
            raise ApiUnavailable("the API server did not answer")
        self.set(annotations)

    def report(self) -> CleanupReport | None:
        text = self.notes.get(REPORT)
        return msgspec.json.decode(text, type=CleanupReport) if text else None


class Obstacles:
    """The obstacles, look by look; none once the list is empty. Counts the clean-ups."""

    def __init__(self) -> None:
        self.next: list[Exception] = []
        self.cleaned = 0

    async def look(self, *_: object) -> None:
        await anyio.lowlevel.checkpoint()
        if self.next:
            raise self.next.pop(0)

    async def stop(self, *_: object) -> None:
        self.cleaned += 1


@pytest.fixture
def obstacles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Obstacles]:
    made = Obstacles()

    async def forget(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(node_files, "refuse_holders", made.look)
    monkeypatch.setattr(node_files, "leave_modes", made.stop)
    monkeypatch.setattr(node_files, "remove_files", lambda *_: True)
    monkeypatch.setattr(node_files, "forget_node", forget)
    monkeypatch.setattr(on_request, "RETRY_SECONDS", 0.01)
    yield made
    assert made.next == []


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    from agent.settings import load

    return load(None, {}, [f"host.run={tmp_path}/run", "modes.mps=false"])


async def accepted(node: OwnNode, settings: Settings) -> CleanupRequest:
    with anyio.fail_after(20):
        return await Requests(settings, node, NOBODY, lambda: NOW).accepted()


@asynccontextmanager
async def serving(node: OwnNode, settings: Settings) -> AsyncIterator[None]:
    """An agent that goes on serving whatever is asked of it."""

    async def serve() -> None:
        raise AssertionError(
            f"left service for {await Requests(settings, node, NOBODY, lambda: NOW).accepted()}"
        )

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        yield
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


def clean_report(name: str) -> CleanupReport:
    return CleanupReport(name, CleanupState.CLEAN)


# While it serves


async def test_a_request_is_accepted(obstacles: Obstacles, settings: Settings) -> None:
    node = OwnNode()
    node.set(asking("a", NOW, 10))
    assert await accepted(node, settings) == CleanupRequest("a", NOW + timedelta(seconds=10))
    assert node.report() is None


async def test_a_pod_in_the_way_is_answered_once_and_service_goes_on(
    obstacles: Obstacles, settings: Settings
) -> None:
    node = OwnNode()
    obstacles.next = [CleanupRefused("team/a holds a share")]
    node.set(asking("a", NOW, 10))
    async with serving(node, settings):
        await until(node, CleanupReport("a", CleanupState.REFUSED, "1 pod holds a share"))
        node.publish()
    assert node.reflector.items.version == 4, "one answer, however often it looks"


async def test_a_node_that_cannot_tell_is_asked_again(obstacles: Obstacles, settings: Settings) -> None:
    node = OwnNode()
    obstacles.next = [CleanupFailed("who holds MPS shares is not known")] * 2
    node.failing = 1
    node.set(asking("a", NOW, 10))
    assert (await accepted(node, settings)).id == "a"
    assert node.report() == CleanupReport("a", CleanupState.FAILED, "who holds MPS shares is not known")


@pytest.mark.parametrize(
    "old", [asking("a", NOW, 0), taking_back("a"), {REPORT: "{"}, asking("a", NOW, LONGEST_SECONDS + 1)]
)
async def test_what_is_over_is_put_away(old: Any, obstacles: Obstacles, settings: Settings) -> None:
    node = OwnNode()
    node.failing = 1
    node.set({**old, "gpu-node-agent.io/state": "{}"})
    async with serving(node, settings):
        with anyio.fail_after(20):
            while NOTHING.keys() & node.notes.keys():
                await anyio.sleep(0.005)
    assert node.notes == {"gpu-node-agent.io/state": "{}"}


def test_no_request_lasts_for_ever() -> None:
    """One that could be would be in force again each time that the agent is back."""
    assert CleanupRequest("a", NOW + timedelta(seconds=LONGEST_SECONDS)).seconds_left(NOW) == LONGEST_SECONDS
    assert CleanupRequest("a", NOW + timedelta(days=400)).seconds_left(NOW) == 0


# Out of service


async def stand(node: OwnNode, settings: Settings, seconds: float = 30.0) -> None:
    """Answer request `a` and stay out of service for it."""
    request = CleanupRequest("a", NOW + timedelta(seconds=seconds))
    node.set(asking("a", NOW, seconds))
    api: Any = KubeApi(None, None)
    nvml: Any = None
    await Standby(settings, nvml, api, node, NOBODY, lambda: NOW).until_over(request)


async def until(node: OwnNode, report: CleanupReport) -> None:
    with anyio.fail_after(20):
        while node.report() != report:
            await anyio.sleep(0.005)


async def test_a_pod_that_came_meanwhile_is_answered_and_the_agent_serves_again(
    obstacles: Obstacles, settings: Settings
) -> None:
    node = OwnNode()
    obstacles.next = [CleanupRefused("team/late holds a share")]
    await stand(node, settings)
    assert node.report() == CleanupReport("a", CleanupState.REFUSED, "1 pod holds a share")
    assert obstacles.cleaned == 0


@pytest.mark.parametrize("kind", [CleanupFailed, OSError])
async def test_it_tries_again_until_it_is_clean(
    kind: type[Exception], obstacles: Obstacles, settings: Settings
) -> None:
    node = OwnNode()
    obstacles.next = [kind("the kubelet does not answer")]
    async with anyio.create_task_group() as group:
        group.start_soon(stand, node, settings)
        await until(node, CleanupReport("a", CleanupState.FAILED, "the kubelet does not answer"))
        await until(node, clean_report("a"))
        node.set(taking_back("a"))
    assert obstacles.cleaned == 1


async def test_what_is_called_off_while_it_fails_is_given_up(
    obstacles: Obstacles, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_request, "RETRY_SECONDS", 60.0)
    node = OwnNode()
    obstacles.next = [CleanupFailed("the kubelet does not answer")]
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(stand, node, settings)
            await until(node, CleanupReport("a", CleanupState.FAILED, "the kubelet does not answer"))
            node.set(taking_back("a"))
    assert obstacles.cleaned == 0


async def test_another_agent_that_serves_is_no_reason_to_wait(
    obstacles: Obstacles, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_request, "LOCK_SECONDS", 0.0)
    node = OwnNode()
    async with node_files.without_agent(settings, 0.0):
        await stand(node, settings)
    found = node.report()
    assert found is not None
    assert found.state is CleanupState.FAILED
    assert "an agent still serves this node" in found.message


async def test_it_waits_for_its_deletion_when_the_hook_is_done(
    obstacles: Obstacles, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large cluster is not deleted in a moment, but nobody waits for ever."""
    monkeypatch.setattr(on_request, "DELETION_SECONDS", 0.1)
    node = OwnNode()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(stand, node, settings, 3000)
            await until(node, clean_report("a"))
            node.set(NOTHING)
    assert node.notes == {}
