"""Clients mapped to pods, what is wrong among them, and the orderly end of those of dying pods."""

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.mps import clients as module
from agent.mps.clients import ClientWatch, Overview, kept_apart
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import DaemonState, DaemonStatus, EventReason
from agent.mps.mps_errors import DaemonRefused
from agent.mps.pods import PodFacts

GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
SERVER = 4000
ID = "0123456789abcdef" * 4


def uid(number: int) -> str:
    return f"3fa85f64-5717-4562-b3fc-2c963f66af{number:02d}"


@dataclass
class Control:
    """A daemon's answers; no real server can be had without a GPU."""

    pids: tuple[int, ...] = ()
    terminated: list[int] = field(default_factory=list)
    stubborn: bool = False

    asked: int = 0

    async def client_pids(self, server: int) -> tuple[int, ...]:
        assert server == SERVER
        self.asked += 1
        return self.pids

    async def terminate_client(self, server: int, client: int) -> None:
        assert server == SERVER
        self.terminated.append(client)
        if self.stubborn:
            raise DaemonRefused("it does not want to")


class Scene:
    """One GPU with its daemon, pods that hold shares of it, and processes."""

    def __init__(self, proc: Path, holders: Iterable[str] = (), multi_user: bool = True) -> None:
        self.control = Control()
        self.pods: list[PodFacts] = []
        self.statuses: Cell[Mapping[str, DaemonStatus]] = Cell(
            {GPU: DaemonStatus(DaemonState.SERVING, pid=3999, server=SERVER, multi_user=multi_user)}
        )
        manager: Any = SimpleNamespace(
            statuses=self.statuses,
            status=lambda uuid: self.statuses.value[uuid],
            daemon=lambda _uuid: SimpleNamespace(control=self.control, clients=self.control.pids),
        )
        held = tuple(
            Holding("default", name, "main", "nvidia.com/mps-core", (f"{GPU}::sc{number}",))
            for number, name in enumerate(holders)
        )
        self._proc = proc
        self.looks = 0  # how often it was asked for the pods
        self.watch = ClientWatch(
            cast("DaemonManager", manager),
            Cell(Record(held, ())),
            self._seen,
            dict,
            lambda *_: None,
            proc=proc,
        )

    def _seen(self) -> list[PodFacts]:
        self.looks += 1
        return self.pods

    async def looked(self, *, until: Callable[[], object] = lambda: True) -> None:
        """Watch until something is so, and a while longer."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.watch.run)
            await _until(until)
            seen = self.looks
            await _until(lambda: self.looks > seen + 5)
            group.cancel_scope.cancel()

    def pod(self, number: int, dies_at: dt.datetime | None = None, grace: float | None = None) -> None:
        self.pods.append(PodFacts(uid(number), "default", f"p{number}", dies_at, grace))

    async def deletes_its_pod(self, skew: int) -> None:
        """Once it was seen, by an API server whose clock is off by so many seconds; 3 s of grace are left."""
        await _until(lambda: self.watch._staying == {uid(1)})
        del self.pods[:]
        self.pod(1, dt.datetime.now(dt.UTC) + dt.timedelta(seconds=skew), grace=3.0)

    def process(self, pid: int, pod: int | None, root: bool = False) -> None:
        folder = self._proc / str(pid)
        folder.mkdir()
        where = f"/kubepods/pod{uid(pod)}/{ID}" if pod is not None else "/user.slice"
        (folder / "cgroup").write_text(f"0::{where}\n")
        user = 0 if root else 1000
        (folder / "status").write_text(f"Name:\tx\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        self.control.pids = (*self.control.pids, pid)

    async def look(self) -> Overview:
        await self.watch.look()
        return self.watch.overviews.value[GPU]


async def _until(reached: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not reached():
            await anyio.sleep(0.01)


async def test_clients_are_mapped_to_their_pods(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ["p1", "p2"])
    scene.pod(1)
    scene.pod(2)
    scene.process(101, 1)
    scene.process(102, 2)
    scene.control.pids += (103,)  # it ended between the daemon's answer and our look
    seen = await scene.look()
    assert [(client.pid, client.pod, client.root) for client in seen.clients] == [
        (101, "default/p1", False),
        (102, "default/p2", False),
    ]
    assert seen.clients[0].container is not None
    assert seen.clients[0].container.container_id == ID
    assert not seen.crowded
    assert not seen.strangers


async def test_containers_with_a_process_each_are_no_crowd(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ["p1"])
    scene.pod(1)
    scene.process(101, 1)
    scene.process(102, 1)
    (tmp_path / "102" / "cgroup").write_text(f"0::/kubepods/pod{uid(1)}/{ID[::-1]}\n")
    assert not (await scene.look()).crowded


async def test_pods_above_their_cap_are_told_once(tmp_path: Path, logs: list[Any]) -> None:
    scene = Scene(tmp_path, ["p1"])
    scene.pod(1)
    scene.process(101, 1)
    scene.watch.exceeding = lambda: {GPU: {"default/p1"}, "GPU-other": {"default/p2"}}
    assert (await scene.look()).exceeding == {"default/p1"}
    await scene.look()
    assert [each["pod"] for each in logs if each["event"] == "mps_pod_above_its_cap"] == ["default/p1"]
    scene.watch.exceeding = dict
    assert not (await scene.look()).exceeding


async def test_what_is_wrong_among_clients_is_told(tmp_path: Path, logs: list[Any]) -> None:
    scene = Scene(tmp_path, ["p1", "p2"])
    for number in (1, 2, 3):
        scene.pod(number)
    scene.process(101, 1)
    scene.process(102, 1)  # a second process has the whole cap for itself, too
    scene.process(103, 2, root=True)
    scene.process(104, 3)  # a pod without a share
    scene.process(105, None)  # a process of the host
    seen = await scene.look()
    assert seen.crowded == {"default/p1"}
    assert seen.rooted == {"default/p2"}
    assert seen.strangers == {104, 105}
    assert not seen.silent
    told = [event["event"] for event in logs]
    assert told.count("mps_pod_with_many_clients") == 1
    assert told.count("mps_pod_runs_as_root") == 1
    assert told.count("mps_client_without_share") == 2
    await scene.look()
    assert [event["event"] for event in logs] == told  # transitions, not states


async def test_pod_that_never_shows_up_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    scene = Scene(tmp_path, ["p1", "p2"])
    scene.pod(1)
    scene.pod(2)
    scene.process(101, 1)
    assert not (await scene.look()).silent
    await anyio.sleep(0.06)
    assert (await scene.look()).silent == {"default/p2"}
    assert [event["pod"] for event in logs if event["event"] == "mps_pod_without_client"] == ["default/p2"]
    scene.process(102, 2)
    assert not (await scene.look()).silent


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING_LOOK_SECONDS", 0.02)


@pytest.mark.usefixtures("often")
async def test_clients_of_dying_pods_are_terminated_once_and_late(tmp_path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    scene = Scene(tmp_path, ["p1", "p2", "p3"])
    scene.pod(1, dies_at=now + dt.timedelta(seconds=1))
    scene.pod(2, dies_at=now + dt.timedelta(seconds=30))  # it may still end by itself
    scene.pod(3)
    for number in (1, 2, 3):
        scene.process(100 + number, number)
    scene.control.stubborn = True  # a refusal is no reason to ask for ever
    await scene.looked(until=lambda: scene.control.terminated)
    assert scene.control.terminated == [101]


@pytest.mark.usefixtures("often")
async def test_a_pod_that_does_not_go_is_not_asked_after_for_ever(tmp_path: Path) -> None:
    """A finalizer may keep a pod for days: asking would keep every daemon busy twice a second."""
    scene = Scene(tmp_path, ["p1"])
    scene.pod(1, dies_at=dt.datetime.now(dt.UTC) - dt.timedelta(hours=1))
    scene.process(101, 1)
    await scene.looked()
    assert scene.control.asked == 0
    assert scene.control.terminated == []


@pytest.mark.usefixtures("often")
async def test_where_no_daemon_runs_nobody_asks_for_pods(tmp_path: Path) -> None:
    """MPS is watched in every mode, since a GPU may come at any time: it costs nothing until then."""
    scene = Scene(tmp_path)
    daemons = scene.statuses.value
    scene.statuses.publish({})
    scene.pod(1)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.watch.run)
        await anyio.sleep(0.2)
        assert scene.looks == 0
        scene.statuses.publish(daemons)
        await _until(lambda: scene.watch._staying)
        scene.statuses.publish({})
        await _until(lambda: not scene.watch._staying)
        seen = scene.looks
        await anyio.sleep(0.2)
        assert scene.looks == seen
        group.cancel_scope.cancel()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("known", [True, False])
async def test_grace_is_counted_before_a_daemon_is_taken_up(tmp_path: Path, known: bool) -> None:
    """The agent has started: the clients of a daemon that it has yet to find run on."""
    scene = Scene(tmp_path, ["p1"])
    daemons, record = scene.statuses.value, scene.watch.holdings.value
    scene.statuses.publish({})
    if not known:
        scene.watch.holdings.publish(None)
    scene.pod(1)
    scene.process(101, 1)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.watch.run)
        await scene.deletes_its_pod(-3600)
        scene.watch.holdings.publish(record)
        await _until(lambda: not scene.watch._staying)
        scene.statuses.publish(daemons)
        await _until(lambda: scene.control.terminated)
        assert scene.control.terminated == [101]
        group.cancel_scope.cancel()


@pytest.mark.usefixtures("often")
async def test_pods_without_shares_are_nobodys_business(tmp_path: Path) -> None:
    scene = Scene(tmp_path, ["p1"])
    scene.pod(1)
    scene.pod(2, dies_at=dt.datetime.now(dt.UTC))
    scene.process(101, 1)
    await scene.looked()
    assert scene.control.asked == 0


async def test_an_init_container_of_a_dying_pod_is_known_by_its_client(tmp_path: Path) -> None:
    """The kubelet's records do not show what it holds."""
    scene = Scene(tmp_path)
    scene.pod(1, dies_at=dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1))
    scene.process(101, 1)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.watch.run)
        await _until(lambda: scene.control.terminated)
        group.cancel_scope.cancel()
    assert scene.control.terminated == [101]


async def test_without_the_api_server_nothing_is_said_of_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone knows the pod of a UID."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    scene = Scene(tmp_path, ["p1", "p2"])
    scene.process(101, 1)
    scene.process(102, None)
    await scene.look()
    await anyio.sleep(0.06)
    seen = await scene.look()
    assert not seen.silent
    assert seen.strangers == {102}


@pytest.mark.parametrize("skew", [-3600, 3600])
async def test_the_grace_period_is_counted_as_the_kubelet_does(tmp_path: Path, skew: int) -> None:
    """The API server's clock may be an hour off; a pod that was there a moment ago has all its time."""
    scene = Scene(tmp_path, ["p1"])
    scene.pod(1)
    scene.process(101, 1)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.watch.run)
        await scene.deletes_its_pod(skew)
        deleted = anyio.current_time()
        await _until(lambda: scene.control.terminated)
        assert anyio.current_time() - deleted >= 3.0 - module.TERMINATE_BEFORE_SECONDS
        assert scene.control.terminated == [101]
        group.cancel_scope.cancel()


@pytest.mark.parametrize("multi_user", [True, False])
async def test_pods_of_different_users_are_told_where_one_user_is_served_at_a_time(
    tmp_path: Path, multi_user: bool
) -> None:
    """One that waits is no client yet: its user is seen in its container."""
    scene = Scene(tmp_path, ["p1", "p2", "p3"], multi_user)
    told: list[tuple[EventReason, str]] = []
    scene.watch.report = lambda kind, _uuid, message, _pids: told.append((kind, message))
    for number in (1, 2, 3):
        scene.pods.append(
            PodFacts(uid(number), "default", f"p{number}", containers={"main": f"{number:064x}"})
        )
        scene.process(100 + number, number, root=number == 3)
        cgroup = f"0::/kubepods/pod{uid(number)}/{number:064x}\n"
        (tmp_path / str(100 + number) / "cgroup").write_text(cgroup)
    scene.process(201, 3)  # the pod's sandbox runs as somebody else, and holds nothing
    scene.control.pids = (101,)
    expected = {"default/p1 (user 1000)", "default/p2 (user 1000)", "default/p3 (user 0)"}
    for _ in range(2):
        assert (await scene.look()).apart == (frozenset() if multi_user else expected)
    assert [kind for kind, _ in told] == ([] if multi_user else [EventReason.USERS])
    assert all("give pods that share a GPU one runAsUser" in message for _, message in told)


def test_a_wrapper_that_is_root_keeps_nobody_apart() -> None:
    """Of several users in a container any may be the one that calls CUDA."""
    assert not kept_apart([("a/p", frozenset({0, 1000})), ("a/q", frozenset({1000})), ("a/r", frozenset())])
    assert not kept_apart([("a/p", frozenset({0})), ("a/p", frozenset({1000}))])
    assert kept_apart([("a/p", frozenset({0})), ("a/q", frozenset({1000, 7}))]) == {
        "a/p (user 0)",
        "a/q (user 7, 1000)",
    }
    # Root in a pod may start processes of any number of users.
    assert kept_apart([("a/p", frozenset({0})), ("a/q", frozenset(range(1, 9)))]) == {
        "a/p (user 0)",
        "a/q (user 1, 2, 3, 4, 5, ...)",
    }
