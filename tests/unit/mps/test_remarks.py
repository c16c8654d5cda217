"""Remarks in status and at /readyz about MPS that works less well than it should, and the event for caps."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio

from agent.cluster.node import NodeInfo
from agent.injection.inject import Injector
from agent.kit.tasks import Cell
from agent.model.modes import Assignment, GpuMode, Mode
from agent.mps.daemon_manager import DaemonManager, MpsEvents
from agent.mps.daemon_parts import DaemonState, DaemonStatus
from agent.mps.pods import pod_facts
from agent.mps.wing import MpsWing
from agent.settings import load
from tests.unit.mps.test_plugin import FakeDaemons, Lister
from tests.unit.pairing.kubelet_model import machine
from tests.wing_node import wing_node

OLD, NEW = (NodeInfo("v1.36.3", f"containerd://{version}") for version in ("1.7.27", "2.4.2"))


class Daemons(FakeDaemons):
    def __init__(self) -> None:
        super().__init__()
        self.leftovers: dict[str, str] = {}

    async def run(self, assignment: Cell[Assignment]) -> None:
        raise AssertionError("no daemon is looked after here")


class Scene:
    """A node with two GPUs, the first in mode MPS."""

    def __init__(self, *settings: str) -> None:
        self.settings = load(None, {}, settings)
        self.inventory = Cell(machine(gpus=2, blocks=40))
        self.uuid = self.inventory.value.gpus[0].uuid
        self.events: list[tuple[str, str]] = []
        self.injector = Injector(self.settings)
        self.assignment = Cell(Assignment({self.uuid: GpuMode(Mode.MPS)}))
        self.status = DaemonStatus(DaemonState.SERVING, multi_user=True)
        self.daemons = Daemons()
        recorder: Any = SimpleNamespace(node=self._event)
        record = Lister()
        node = wing_node(
            self.settings,
            snapshot=self.inventory,
            assignment=self.assignment,
            injector=self.injector,
            holdings=record,
            cluster=SimpleNamespace(events=recorder, pods=None),
        )
        self.wing = MpsWing(node, cast("DaemonManager", self.daemons), MpsEvents(node, pod_facts(None)))

    def _event(self, reason: str, text: str, warning: bool) -> None:
        assert warning
        self.events.append((reason, text))

    def seen(self, software: NodeInfo) -> None:
        self.injector.software = software
        self.injector.looked.publish(software)

    async def task(self, name: str) -> None:
        (task,) = (each for each in self.wing.tasks() if each.name == name)
        await task.run()

    def remarks(self) -> Sequence[str]:
        self.daemons.statuses.publish({self.uuid: self.status})
        return self.wing.remarks()


async def test_advisory_caps_are_told_once_and_no_more_once_they_hold() -> None:
    scene = Scene()
    async with anyio.create_task_group() as group:
        group.start_soon(scene.task, "mps caps")
        await anyio.wait_all_tasks_blocked()
        assert not scene.remarks()  # the versions are not known yet
        assert not scene.events
        scene.seen(OLD)
        await anyio.wait_all_tasks_blocked()
        (remark,) = scene.remarks()
        assert "advisory here, a pod's own variables win over them: containerd://1.7.27" in remark
        scene.assignment.publish(Assignment({scene.uuid: GpuMode(Mode.MPS, replicas=2)}))
        await anyio.wait_all_tasks_blocked()
        assert scene.events == [("MPSCapsAdvisory", remark)]
        scene.assignment.publish(Assignment({scene.uuid: GpuMode(Mode.PGPU)}))
        assert not scene.remarks()  # nothing is offered by them
        scene.assignment.publish(Assignment({scene.uuid: GpuMode(Mode.MPS)}))
        scene.seen(NEW)
        await anyio.wait_all_tasks_blocked()
        assert not scene.remarks()
        group.cancel_scope.cancel()


def test_what_is_refused_is_not_recommended_again() -> None:
    scene = Scene("mps.advisoryCaps=refuse")
    scene.seen(OLD)
    (remark,) = scene.remarks()
    assert remark.startswith(
        "no MPS share is offered, since a pod could undo its caps here: containerd://1.7.27"
    )


def test_refused_root_where_one_user_is_served_at_a_time_is_told_of() -> None:
    scene = Scene("mps.rootPods=refuse")
    scene.seen(NEW)
    assert not scene.remarks()
    scene.status = DaemonStatus(DaemonState.SERVING, multi_user=False)
    (remark,) = scene.remarks()
    assert "wait for each other unless they have one runAsUser" in remark


def test_what_stands_in_the_way_of_a_gpu_names_it_by_its_index() -> None:
    scene = Scene()
    scene.seen(NEW)
    scene.daemons.leftovers |= {scene.uuid: "compute mode DEFAULT cannot be set", "GPU-gone": "it is away"}
    assert sorted(scene.remarks()) == [
        "GPU 0: compute mode DEFAULT cannot be set",
        "GPU GPU-gone: it is away",
    ]
