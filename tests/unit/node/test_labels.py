"""GPU labels beside GPU Feature Discovery, which may come to a node and leave it at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio
import pytest

from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.model.gpu import Gpu, Instance
from agent.model.modes import Assignment, GpuMode, Mode
from agent.modes.planner import GpuSwitch, Phase, SwitchState
from agent.node.conditions import (
    GFD_MARK,
    GFD_MARKS,
    LABELLED,
    MODE_LABEL,
    NFD_LABELS,
    NodeStateWriter,
    labels_of,
    strategy_of,
)
from agent.node.forget import is_ours
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.unit.node.test_telling import OwnNode
from tests.virtual_time import in_virtual_time

PRODUCT = "nvidia.com/gpu.product"
GFD = {GFD_MARK: "1790000000", PRODUCT: "NVIDIA-H200-SHARED", "nvidia.com/gpu.count": "1"}
APPLIED = SwitchState(Phase.APPLIED, "pgpu", "2 GPU(s) pgpu", (), "pgpu")


@dataclass
class Node(OwnNode):
    """Keeps what was written."""

    written: list[Mapping[str, str | None]] = field(default_factory=list)

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        await super().write_metadata(labels, annotations)
        self.written.append(labels)

    def put(self, labels: Mapping[str, str]) -> None:
        """Somebody else writes labels."""
        self.known = {**(self.known or {}), **labels}
        self.changes.publish(object())


def writer(node: Node, state: Cell[SwitchState], snapshot: Cell[Snapshot]) -> NodeStateWriter:
    return NodeStateWriter(
        node,
        state,
        labels=lambda present, notes: labels_of(snapshot.value, Assignment(), present, None, notes),
        wake_on=(snapshot,),
    )


@in_virtual_time
async def test_labels_of_gfd_are_reconsidered_when_they_appear() -> None:
    node, state, snapshot = Node(), Cell(APPLIED), Cell(snapshot_of(gpu(0), gpu(1)))
    async with anyio.create_task_group() as group:
        group.start_soon(writer(node, state, snapshot).run)
        await anyio.sleep(5)
        assert node.known is not None
        assert (node.known[PRODUCT], node.known["nvidia.com/gpu.count"]) == ("NVIDIA-H200", "2")
        before = len(node.written)
        # In the second in which the writer leaves the API server alone, with something to write at its end.
        state.publish(SwitchState(Phase.SWITCHING, "vgpu", "setting up", (), "pgpu"))
        await anyio.sleep(0.5)
        node.put(GFD)
        state.publish(SwitchState(Phase.APPLIED, "vgpu", "2 GPU(s) vgpu", (), "vgpu"))
        snapshot.publish(snapshot_of(gpu(0), gpu(1), gpu(2)))  # a third GPU: the count would differ, too
        await anyio.sleep(600)
        assert {key: node.known[key] for key in GFD} == GFD
        assert node.known[MODE_LABEL] == "vgpu"
        assert all(set(labels) <= {MODE_LABEL} for labels in node.written[before:])
        # GPU Feature Discovery leaves and takes its labels along.
        node.known = {key: value for key, value in node.known.items() if key not in GFD}
        node.changes.publish(object())
        await anyio.sleep(5)
        assert (node.known[PRODUCT], node.known["nvidia.com/gpu.count"]) == ("NVIDIA-H200", "3")
        group.cancel_scope.cancel()


@in_virtual_time
async def test_labels_come_with_a_driver_that_comes_late_and_stay_when_it_goes() -> None:
    node, state, snapshot = Node(), Cell(APPLIED), Cell(Snapshot())
    async with anyio.create_task_group() as group:
        group.start_soon(writer(node, state, snapshot).run)
        await anyio.sleep(5)
        assert node.known == {MODE_LABEL: "pgpu"}
        snapshot.publish(snapshot_of(gpu(0)))
        await anyio.sleep(5)
        assert (node.known or {})[PRODUCT] == "NVIDIA-H200"
        snapshot.publish(Snapshot(problem="the driver is being replaced"))
        await anyio.sleep(5)
        assert (node.known or {})[PRODUCT] == "NVIDIA-H200"
        group.cancel_scope.cancel()


def parted(index: int, *profiles: str) -> Gpu:
    instances = tuple(
        Instance(f"MIG-{index}-{n}", n, 0, profile, 16384 << 20, 16, 1, 1, (1, 1, 0, 1, 0))
        for n, profile in enumerate(profiles)
    )
    return replace(gpu(index), mig_enabled=True, mig_switch="live", instances=instances)


def described(
    *gpus: Gpu, strategy: str | None, present: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Labels about instances and, with strategy single, about what nvidia.com/gpu is."""
    found = labels_of(snapshot_of(*gpus), Assignment(), present or {}, strategy)
    return {key.removeprefix("nvidia.com/"): text for key, text in found.items()}


def test_instances_are_labelled_as_gfd_labels_them() -> None:
    found = described(parted(0, "1g.18gb", "1g.18gb+me"), parted(1, "1g.18gb"), gpu(2), strategy="mixed")
    assert (found["mig.capable"], found["mig.strategy"]) == ("true", "mixed")
    assert (found["gpu.product"], found["gpu.count"], found["gpu.replicas"]) == ("NVIDIA-H200", "3", "1")
    small = {key: text for key, text in found.items() if key.startswith("mig-1g.18gb.") and ".me." not in key}
    assert {key.removeprefix("mig-1g.18gb."): text for key, text in small.items()} == {
        "product": "NVIDIA-H200-MIG-1g.18gb",
        "count": "2",
        "replicas": "1",
        "memory": "16384",
        "multiprocessors": "16",
        "slices.gi": "1",
        "slices.ci": "1",
        "engines.copy": "1",
        "engines.decoder": "1",
        "engines.encoder": "0",
        "engines.jpeg": "1",
        "engines.ofa": "0",
    }
    assert found["mig-1g.18gb.me.product"] == "NVIDIA-H200-MIG-1g.18gb.me"
    assert found["mig-1g.18gb.me.count"] == "1"


def test_strategy_single_describes_gpus_as_their_instances() -> None:
    found = described(parted(0, "3g.71gb", "3g.71gb"), parted(1, "3g.71gb"), strategy="single")
    assert found["gpu.product"] == "NVIDIA-H200-MIG-3g.71gb"
    assert (found["gpu.count"], found["gpu.replicas"], found["gpu.memory"]) == ("3", "1", "16384")
    assert (found["gpu.slices.gi"], found["gpu.compute.major"]) == ("1", "9")
    for gpus in ((parted(0, "3g.71gb"), gpu(1)), (parted(0, "3g.71gb", "1g.18gb"),), (parted(0),)):
        found = described(*gpus, strategy="single")
        assert found["gpu.product"] == "NVIDIA-H200-MIG-INVALID"
        assert {found[f"gpu.{part}"] for part in ("count", "replicas", "memory")} == {"0"}
        assert "gpu.slices.gi" not in found
    assert described(gpu(0), strategy="single")["gpu.product"] == "NVIDIA-H200"


def test_labels_of_profiles_that_are_gone_go() -> None:
    there = {
        "nvidia.com/mig-3g.71gb.count": "1",
        "nvidia.com/gpu.slices.gi": "3",
        "nvidia.com/mig-2g.35gb.count": "1",
        "nvidia.com/mig.config": "all-3g.71gb",
    }
    notes = {LABELLED: "gpu.slices.gi,mig-3g.71gb.count,mig.config"}  # the last is none that we write
    found = labels_of(snapshot_of(parted(0, "1g.18gb")), Assignment(), there, "mixed", notes)
    ours = list(there)[:2]
    assert [key for key in there if found.get(key, "") is None] == ours
    assert [key for key in there if is_ours(key, there, notes)] == ours


@pytest.mark.parametrize("mark", sorted(GFD_MARKS))
def test_gfd_is_known_by_each_of_its_marks(mark: str) -> None:
    there = {
        mark: "1",
        "nvidia.com/mig-1g.18gb.count": "7",
        "nvidia.com/gpu.slices.gi": "3",
        PRODUCT: "theirs",
    }
    found = labels_of(snapshot_of(parted(0, "1g.18gb")), Assignment(), there, "mixed")
    assert set(found) == {"cuda-major-version", "cuda-minor-version"}
    assert not [key for key in there if is_ours(key, there, {})]


@in_virtual_time
async def test_what_a_gfd_that_comes_later_does_not_own_is_taken_away() -> None:
    one, whole = parted(0, "1g.18gb"), gpu(0)
    node, snapshot, offered = Node(), Cell(snapshot_of(one)), ["mixed"]
    made = NodeStateWriter(
        node,
        Cell(APPLIED),
        labels=lambda *there: labels_of(snapshot.value, Assignment(), there[0], offered[0], there[1]),
        wake_on=(snapshot,),
    )
    by_nfd = {"mig.capable", "mig-1g.18gb.count"}
    async with anyio.create_task_group() as group:
        group.start_soon(made.run)
        await anyio.sleep(5)
        assert node.known is not None
        described = {key for key in node.known if key.startswith("nvidia.com/mig")}
        assert described == {f"nvidia.com/{key}" for key in node.notes[LABELLED].split(",")}
        assert len(described) > len(by_nfd)
        node.put({GFD_MARK: "1", "nvidia.com/mig-1g.18gb.count": "7"})
        await anyio.sleep(5)
        assert described < node.known.keys()  # nobody says which of them are GFD's
        keys = ",".join(["cpu-model", GFD_MARK, *(f"nvidia.com/{key}" for key in by_nfd)])
        node.notes[f"second.{NFD_LABELS}"] = keys
        node.put({})
        await anyio.sleep(5)
        assert described & node.known.keys() == {f"nvidia.com/{key}" for key in by_nfd}
        assert node.known["nvidia.com/mig-1g.18gb.count"] == "7"
        assert LABELLED not in node.notes
        snapshot.publish(snapshot_of(whole))
        count = len(node.written)
        await anyio.sleep(60)
        assert len(node.written) == count
        group.cancel_scope.cancel()


def test_instances_are_offered_where_a_gpu_is_or_shall_be_in_their_mode() -> None:
    def state(active: Mode, wanted: Mode) -> SwitchState:
        return replace(APPLIED, gpus=(GpuSwitch(0, "GPU-a", GpuMode(active), GpuMode(wanted)),))

    assert strategy_of(state(Mode.MIG, Mode.MIG), "single") == "single"
    assert strategy_of(state(Mode.OFF, Mode.MIG), "mixed") == "mixed"  # as at each start of the agent
    assert strategy_of(state(Mode.PGPU, Mode.PGPU), "mixed") is None


def test_instances_that_are_not_offered_are_not_described() -> None:
    found = described(parted(0, "1g.18gb"), strategy=None)
    assert found["mig.capable"] == "true"
    assert not {key for key in found if key.startswith("mig-") or key == "mig.strategy"}
    assert found["gpu.replicas"] == "0"  # as of all GPUs in MIG mode
    assert described(gpu(0), strategy=None)["mig.capable"] == "false"
