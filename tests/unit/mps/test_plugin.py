"""Additions of MPS to the pair of resources: caps, ceiling, daemons that must serve."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import anyio
import pytest

from agent.cluster.node import NodeInfo
from agent.injection.inject import InjectionChoice, Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.wire import Reason, Refused
from agent.model.holding import Holding, PairMember, Record, Source
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.pod import MPS, WAITING_FOR_GPU, Container, Pod
from agent.mps import plugin as mps
from agent.mps.daemon_manager import DaemonManager
from agent.mps.plugin import Conditions, MpsPlugin
from agent.mps.pods import RootCheck
from agent.pairing.pairing import Pairing, Recorder
from agent.pairing.pod_source import PodSource
from agent.settings import Settings, load
from tests.pods import a_pod
from tests.unit.pairing.kubelet_model import machine
from tests.wing_node import wing_node


class FakeDaemons:
    """FakeDaemons that serve or not, as the test says."""

    def __init__(self) -> None:
        self.statuses: Cell[Mapping[str, Any]] = Cell({})
        self.down: set[str] = set()

    def set(self, *down: str) -> None:
        self.down = set(down)
        self.statuses.publish(dict.fromkeys(down, "down"))

    def unready(self, uuid: str) -> str:
        return "the daemon was killed" if uuid in self.down else ""

    def pipe(self, uuid: str) -> str:
        return f"/run/gna/mps/{uuid}/pipe"

    def shared_memory(self, uuid: str) -> str:
        return f"/run/gna/mps/{uuid}/shm"

    async def wait_serving(self, uuid: str) -> None:
        await self.statuses.wait_for(lambda _: uuid not in self.down)


class Lister:
    """The kubelet's records."""

    def __init__(self) -> None:
        self.holdings: list[Holding] = []
        self.cell: Cell[Record | None] = Cell(None)

    async def look(self, deadline: float = 2.0) -> Record:
        del deadline
        return Record(tuple(self.holdings), tuple({(h.namespace, h.pod, h.container) for h in self.holdings}))

    def hold(self, pod: str, gpu: str, cores: range, memory: range, container: str = "main") -> None:
        for resource, mark, numbers in ((MPS.core, "sc", cores), (MPS.memory, "sm", memory)):
            source = Source.LISTED if container == "main" else Source.CHECKPOINT
            if ids := tuple(f"{gpu}::{mark}{number}" for number in numbers):
                self.holdings.append(Holding("default", pod, container, resource, ids, source))


class Node:
    """Two GPUs of 10 GiB in mode MPS."""

    def __init__(
        self, *settings: str, source: PodSource | None = None, recorder: Recorder | None = None
    ) -> None:
        self.snapshot: Snapshot = machine(gpus=2, blocks=40)
        self.uuids = [state.uuid for state in self.snapshot.gpus]
        inventory = Cell(self.snapshot)
        modes = Cell(Assignment({uuid: GpuMode(Mode.MPS) for uuid in self.uuids}))
        self.daemons, self.lister = FakeDaemons(), Lister()
        configuration: Settings = load(None, {}, settings)
        self.injector = Injector(configuration)
        context = wing_node(
            configuration,
            snapshot=inventory,
            assignment=modes,
            holdings=self.lister,
            injector=self.injector,
            pods=source or PodSource(),
            recorder=recorder or Recorder(),
        )
        conditions, plugins = mps.build(context, cast("DaemonManager", self.daemons))
        self.pairing: Pairing = conditions.pairing
        self.conditions: Conditions = conditions
        self.plugins: dict[PairMember, MpsPlugin] = dict(zip(PairMember, plugins, strict=True))

    def figures(self, member: PairMember) -> tuple[int, int]:
        modes = Assignment({uuid: GpuMode(Mode.MPS) for uuid in self.uuids})
        self.plugins[member].refresh()
        return self.plugins[member].figures(modes)


def test_one_gibibyte_of_each_gpu_is_kept_for_the_server() -> None:
    node = Node()
    assert node.figures(PairMember.CORE) == (200, 200)
    assert node.figures(PairMember.MEMORY) == (18, 18)


def test_each_half_answers_its_own_caps_by_variables() -> None:
    node = Node()
    gpus = [node.snapshot.gpus[0].gpu]
    core = node.conditions.extras(PairMember.CORE, ["a"] * 15, gpus)
    memory = node.conditions.extras(PairMember.MEMORY, ["a"] * 4, gpus)
    assert core.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/gpu-node-agent/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "15",
    }
    assert memory.environment == {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"}
    assert {each.container_path: (each.host_path, each.read_only) for each in core.mounts} == {
        "/run/gpu-node-agent/mps": (f"/run/gna/mps/{gpus[0].uuid}/pipe", True),
        "/dev/shm": (f"/run/gna/mps/{gpus[0].uuid}/shm", False),
    }
    assert not memory.mounts


def test_caps_go_by_cdi_wherever_the_node_has_it_even_without_the_toolkit() -> None:
    node = Node()
    node.injector.software = NodeInfo("v1.36.3", "containerd://2.4.2")
    assert node.injector.choice == InjectionChoice(False, node.injector.choice.reason)
    answer = node.conditions.extras(PairMember.MEMORY, ["a"] * 4, [node.snapshot.gpus[0].gpu])
    assert answer.cdi_devices == ("gpu-node-agent.io/share=mps-memory-4",)
    assert not answer.environment
    node.injector.software = NodeInfo("v1.28.0", "containerd://1.7.0")
    assert not node.conditions.extras(PairMember.MEMORY, ["a"] * 4, [node.snapshot.gpus[0].gpu]).cdi_devices


async def test_caps_that_a_pod_can_undo_are_not_sold_where_the_configuration_says_so() -> None:
    """containerd 1.7 is handed caps as variables, and the pod's own win over them."""
    lenient, strict = Node(), Node("mps.advisoryCaps=refuse")
    for node in (lenient, strict):
        node.injector.software = NodeInfo("v1.36.3", "containerd://1.7.27")
    assert lenient.figures(PairMember.CORE) == (200, 200)
    assert strict.figures(PairMember.CORE) == (200, 0)
    assert "containerd://1.7.27 is not known to inject CDI" in strict.conditions.unready(strict.uuids[0])
    with pytest.raises(Refused, match=r"mps\.advisoryCaps refuses"):
        strict.conditions.extras(PairMember.CORE, ["a"], [strict.snapshot.gpus[0].gpu])
    plugin = strict.plugins[PairMember.CORE]
    async with anyio.create_task_group() as group:
        group.start_soon(plugin.run)
        await anyio.wait_all_tasks_blocked()
        # The node was updated.
        strict.injector.software = NodeInfo("v1.36.3", "containerd://2.4.2")
        strict.injector.looked.publish(strict.injector.software)
        await anyio.wait_all_tasks_blocked()
        modes = Assignment({uuid: GpuMode(Mode.MPS) for uuid in strict.uuids})
        assert plugin.figures(modes) == (200, 200)
        group.cancel_scope.cancel()
    by_choice = Node("mps.advisoryCaps=refuse", "injection.strategy=envvar")
    by_choice.injector.software = NodeInfo("v1.36.3", "containerd://2.4.2")
    assert "injection.strategy is envvar" in by_choice.conditions.unready(by_choice.uuids[0])


def test_ids_are_unhealthy_while_the_daemon_does_not_serve() -> None:
    node = Node()
    node.daemons.set(node.uuids[0])
    assert node.figures(PairMember.CORE) == (200, 100)
    assert node.figures(PairMember.MEMORY) == (18, 9)
    node.daemons.set()
    assert node.figures(PairMember.CORE) == (200, 200)


async def test_no_more_holders_than_clients_fit() -> None:
    node = Node("mps.mostClients=3")
    for number in range(2):
        node.lister.hold(
            f"p{number}", node.uuids[0], range(10 * number, 10 * number + 10), range(number, number + 1)
        )
    await node.pairing.reconcile()
    assert node.figures(PairMember.CORE) == (200, 200)
    node.lister.hold("p2", node.uuids[0], range(50, 60), range(5, 6))
    await node.pairing.reconcile()
    assert "MPS serves 3" in node.conditions.full(node.uuids[0])
    # What is held stays, and nothing else of that GPU.
    assert node.figures(PairMember.CORE) == (130, 130)
    assert node.figures(PairMember.MEMORY) == (12, 12)
    del node.lister.holdings[-2:]
    await node.pairing.reconcile()
    assert node.figures(PairMember.CORE) == (200, 200)


def test_ceiling_is_the_table_unless_the_configuration_asks_for_less() -> None:
    assert Node().conditions.ceiling(Node().uuids[0]) == 48
    assert Node("mps.mostClients=5").conditions.ceiling(Node().uuids[0]) == 5
    assert Node("mps.mostClients=60").conditions.ceiling(Node().uuids[0]) == 48


async def test_container_waits_for_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.lister.hold("p", node.uuids[0], range(10), range(2))
    ids = [f"{node.uuids[0]}::sc{number}" for number in range(10)]
    core = node.plugins[PairMember.CORE]
    assert core.needs_pre_start
    assert not node.plugins[PairMember.MEMORY].needs_pre_start
    node.daemons.set(node.uuids[0])
    async with anyio.create_task_group() as group:
        group.start_soon(core.pre_start, ids)
        await anyio.wait_all_tasks_blocked()
        node.daemons.set()
    monkeypatch.setattr(mps, "WAIT_SECONDS", 0.05)
    node.daemons.set(node.uuids[0])
    with pytest.raises(Refused, match=r"did not serve within 0\.05 s: the daemon was killed"):
        await core.pre_start(ids)


async def test_a_pod_whose_container_cannot_start_is_told_why() -> None:
    pod = a_pod("default", "p", (Container("main", {MPS.core: 10}),), uid="u")
    told: list[tuple[Pod, str, str]] = []

    class Pods(PodSource):
        def pods_on_node(self) -> list[Pod]:
            return [pod]

    class Told(Recorder):
        def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
            assert warning
            assert reason == WAITING_FOR_GPU
            told.append((pod, message, key))

    node = Node(source=Pods(), recorder=Told())
    node.lister.hold("p", node.uuids[0], range(10), range(0))
    node.lister.hold("unknown", node.uuids[0], range(10, 20), range(0))
    core = node.plugins[PairMember.CORE]
    for _ in range(2):
        with pytest.raises(Refused):
            await core.pre_start([f"{node.uuids[0]}::sc{number}" for number in range(10)])
    assert [(one, key) for one, _, key in told] == [(pod, Reason.INVALID.value)] * 2
    assert "add nvidia.com/mps-memory to its limits" in told[0][1]
    with pytest.raises(Refused):
        await core.pre_start([f"{node.uuids[0]}::sc{number}" for number in range(10, 20)])
    assert len(told) == 2


async def test_cores_without_memory_never_start() -> None:
    node = Node()
    node.lister.hold("p", node.uuids[0], range(10), range(0))
    with pytest.raises(Refused, match=r"add nvidia\.com/mps-memory to its limits"):
        await node.plugins[PairMember.CORE].pre_start(
            [f"{node.uuids[0]}::sc{number}" for number in range(10)]
        )


@dataclass
class Users(RootCheck):
    """Who may run as root."""

    of_main: str | None = None
    of_any: str | None = None

    def named(self, namespace: str, pod: str, container: str) -> str | None:
        assert (namespace, pod, container) == ("default", "p", "main")
        return self.of_main

    def unnamed(self, cores: int, known: AbstractSet[tuple[str, str, str]]) -> str | None:
        assert cores == 10
        assert known == {("default", "other", "main")}
        return self.of_any


async def test_root_pods_are_refused_where_the_configuration_says_so() -> None:
    node, users = Node(), Users(of_main="runAsUser is 0")
    node.lister.hold("p", node.uuids[0], range(10), range(2))
    ids = [f"{node.uuids[0]}::sc{number}" for number in range(10)]
    core = node.plugins[PairMember.CORE]
    core._root_check = users
    with pytest.raises(Refused, match="runAsNonRoot"):
        await core.pre_start(ids)
    users.of_main = None
    await core.pre_start(ids)


async def test_a_root_init_container_is_refused_though_another_inherited_its_cores() -> None:
    node = Node()
    for container in ("main", "prepare"):
        node.lister.hold("p", node.uuids[0], range(10), range(2), container)

    class Users(RootCheck):
        def named(self, namespace: str, pod: str, container: str) -> str | None:
            return "runAsUser is 0" if container == "prepare" else None

        def unnamed(self, cores: int, known: AbstractSet[tuple[str, str, str]]) -> str | None:
            raise AssertionError("both are known")

    node.plugins[PairMember.CORE]._root_check = Users(None)
    with pytest.raises(Refused, match=r"default/p, container prepare may run as root"):
        await node.plugins[PairMember.CORE].pre_start(
            [f"{node.uuids[0]}::sc{number}" for number in range(10)]
        )


async def test_init_containers_are_one_client_and_none_beside_their_heirs() -> None:
    node = Node("mps.mostClients=3")
    for pod, containers in (("a", ("one", "two")), ("b", ("prepare", "main"))):
        for place, container in enumerate(containers):
            first = 20 * place + (50 if pod == "b" else 0)
            node.lister.hold(pod, node.uuids[0], range(first, first + 10), range(place, place + 1), container)
    await node.pairing.reconcile()
    assert not node.conditions.full(node.uuids[0])
    node.lister.hold("c", node.uuids[0], range(90, 95), range(6, 7))
    await node.pairing.reconcile()
    assert "3 containers hold shares" in node.conditions.full(node.uuids[0])


async def test_an_init_container_whose_grant_is_long_ago_starts_unless_it_may_be_root() -> None:
    """After a slow pull neither records nor promises tell whose its cores are."""
    node, users = Node(), Users()
    node.lister.hold("other", node.uuids[0], range(20, 30), range(2))
    ids = [f"{node.uuids[0]}::sc{number}" for number in range(10)]
    core = node.plugins[PairMember.CORE]
    core._root_check = users
    await core.pre_start(ids)
    users.of_any = "init container load of default/q may run as root (runAsUser is 0)"
    with pytest.raises(Refused, match=r"default/q may run as root") as refused:
        await core.pre_start(ids)
    assert refused.value.reason is Reason.UNAVAILABLE
