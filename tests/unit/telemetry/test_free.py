"""Free GPUs by mode."""

from dataclasses import replace

import pytest

from agent.kit.tasks import Cell
from agent.model.gpu import Instance
from agent.model.holding import Growth, Holding, Record
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.resource_claim import ClaimedShare
from agent.nvml.port import Sample
from agent.telemetry.container_use import Uses
from agent.telemetry.containers import Attribution, attribute, shares_of
from agent.telemetry.health_metrics import free_collector, free_series
from tests.unit.modes.nodes import gpu, snapshot_of

SNAPSHOT = snapshot_of(*map(gpu, range(4)))
UUIDS = [each.uuid for each in SNAPSHOT.gpus]
GPUS = {each.uuid: each.gpu for each in SNAPSHOT.gpus}
GIB = 1 << 30
TOTAL = 140 * 4  # blocks of 256 MiB


def held(*units: tuple[int, str, int]) -> list[Holding]:
    """A pod for each: GPU, mark and number of units."""
    return [
        Holding("a", f"p{n}", "main", "any", tuple(f"{UUIDS[index]}::{mark}{at}" for at in range(count)))
        for n, (index, mark, count) in enumerate(units)
    ]


def found(
    modes: dict[int, GpuMode], holdings: list[Holding], grown: Growth | None = None
) -> dict[str, tuple[float, ...]]:
    """By mode: free GPUs, free compute, the largest free part, what is of no use."""
    assignment = Assignment({UUIDS[index]: mode for index, mode in modes.items()})
    slices = {uuid: mode.replicas for uuid, mode in assignment.gpus.items()}
    growth = {("a", "p0", "main", UUIDS[0]): grown} if grown else {}
    shares = shares_of(Record(tuple(holdings), ()), GPUS, slices, growth)
    values: dict[str, tuple[float, ...]] = {}
    for definition, value, (mode,) in free_series(SNAPSHOT, assignment, shares, most_clients=2):
        assert definition.name.startswith("gpu_agent_")
        values[mode] = (*values.get(mode, ()), round(value, 3))
    return values


FRACTIONS = {index: GpuMode(Mode.VGPU) for index in range(4)}


def test_an_empty_node_is_free() -> None:
    assert found(FRACTIONS, [])["vgpu"][:3] == (4, 4.0, 1.0)


def test_shares_leave_what_they_leave() -> None:
    free, compute, largest, unusable = found(FRACTIONS, held((0, "c", 30), (1, "c", 90)))["vgpu"]
    assert (free, compute, largest) == (2, 2.8, 1.0)
    # Most pods of the usual mix want a whole GPU: what is left of the two is of no use to them.
    assert 0.5 < unusable < 0.8


@pytest.mark.parametrize("memory", [TOTAL - 4, TOTAL])
def test_compute_without_memory_is_of_no_use(memory: int) -> None:
    one = {0: GpuMode(Mode.VGPU)}
    _, compute, largest, unusable = found(one, held((0, "m", memory)))["vgpu"]
    assert (compute, largest < 0.02, unusable) == (1.0, True, 1.0)


def test_what_a_container_has_grown_by_is_not_free() -> None:
    one = {0: GpuMode(Mode.VGPU)}
    assert found(one, held((0, "c", 20)), Growth(GIB, 30))["vgpu"][:2] == (0, 0.5)


def test_cores_that_a_container_has_grown_to_leave_the_memory_to_others() -> None:
    one = {0: GpuMode(Mode.VGPU)}
    taken = [*held((0, "c", 60)), Holding("b", "q", "main", "any", (f"{UUIDS[0]}::m0",))]
    shares = shares_of(Record(tuple(taken), ()), GPUS, {}, {("a", "p0", "main", UUIDS[0]): Growth(cores=40)})
    assert [(each.core_limit, each.memory_limit, each.held) for each in shares] == [
        (1.0, 0, 1.0),
        (None, GIB // 4, pytest.approx(1 / TOTAL, abs=0.0002)),
    ]
    assert found(one, taken, Growth(cores=40))["vgpu"] == (0, 0.0, 0.0, 0.0)


def test_all_cores_are_the_gpu_with_its_memory() -> None:
    assert found({0: GpuMode(Mode.VGPU)}, held((0, "c", 100)))["vgpu"] == (0, 0.0, 0.0, 0.0)


def test_a_ceiling_of_clients_leaves_nothing_for_a_third() -> None:
    one = {0: GpuMode(Mode.MPS)}
    assert found(one, held((0, "sc", 10)))["mps"][2] == 0.9
    assert found(one, held((0, "sc", 10), (0, "sc", 10)))["mps"][1:3] == (0.8, 0.0)


def test_time_slices_and_whole_gpus() -> None:
    modes = {0: GpuMode(Mode.PGPU), 1: GpuMode(Mode.PGPU, replicas=4), 2: GpuMode(Mode.PGPU)}
    taken = [*held((1, "r", 1)), Holding("b", "q", "main", "nvidia.com/gpu", (UUIDS[2],))]
    assert found(modes, taken)["pgpu"] == (1, 1.75, 1.0, 0)
    assert found({1: modes[1]}, taken)["pgpu"] == (0, 0.75, 0.25, 0)


@pytest.mark.parametrize("slices", range(1, 101))
def test_a_gpu_whose_slices_are_all_held_has_none_free(slices: int) -> None:
    modes = {0: GpuMode(Mode.PGPU, replicas=slices)}
    by_pod = [Holding("a", f"p{n}", "main", "any", (f"{UUIDS[0]}::r{n}",)) for n in range(slices)]
    assert found(modes, by_pod)["pgpu"] == (0, 0.0, 0.0, 0)


def test_nothing_is_said_of_gpus_that_are_partitioned() -> None:
    assert found({0: GpuMode(Mode.MIG)}, []) == {}


def test_a_claim_that_containers_share_is_held_once() -> None:
    def claimed(container: str, mode: Mode, cores: int = 0, memory: int = 0) -> Holding:
        share = ClaimedShare(UUIDS[0], mode, cores, memory, claim="team-gpu")
        return Holding("a", "p", container, "", (), share=share)

    whole = [claimed(name, Mode.PGPU) for name in ("one", "two")]
    found_whole = shares_of(Record(tuple(whole), ()), GPUS)
    assert [each.held for each in found_whole] == [0.5, 0.5]
    parts = [claimed(name, Mode.MPS, cores=40, memory=8) for name in ("one", "two")]
    assert [each.held for each in shares_of(Record(tuple(parts), ()), GPUS)] == [0.2, 0.2]
    assert found({0: GpuMode(Mode.MPS)}, parts)["mps"][1] == 0.6
    others = [replace(parts[1], namespace="b")]  # a claim of that name in another namespace
    assert [each.held for each in shares_of(Record((parts[0], *others), ()), GPUS)] == [0.4, 0.4]


def test_devices_of_dra_are_free_whole_or_in_parts() -> None:
    modes = {
        0: GpuMode(Mode.MPS, dra=True),
        1: GpuMode(Mode.DRA, dra=True),
        2: GpuMode(Mode.PGPU, dra=True),
    }
    shares = [
        ClaimedShare(UUIDS[0], Mode.MPS, 30, 8, claim="c"),
        ClaimedShare(UUIDS[2], Mode.PGPU, claim="w"),
    ]
    taken = [Holding("a", f"p{n}", "main", "", (), share=each) for n, each in enumerate(shares)]
    assert found(modes, taken) == {"dra": (1, 1.7, 1.0, 0)}
    cordoned = GpuMode(Mode.DRA, Offering.CLOSED, "cordoned", dra=True)
    assert found({1: cordoned}, []) == {"dra": (0, 0.0, 0.0, 0)}


def test_a_gpu_that_drains_or_is_off_has_nothing_to_give() -> None:
    modes = {0: GpuMode(Mode.VGPU, Offering.CLOSED), 1: GpuMode()}
    assert found(modes, []) == {"vgpu": (0, 0.0, 0.0, 0.0)}


def test_nothing_is_said_while_nobody_knows_who_holds_what() -> None:
    record: Cell[Record | None] = Cell(None)
    uses = Cell(Uses())
    cells = (Cell(SNAPSHOT), Cell(Assignment({UUIDS[0]: GpuMode(Mode.VGPU)})), record, uses)
    assert not list(free_collector(*cells, None))
    record.publish(Record(tuple(held((0, "c", 10))), ()))
    assert not list(free_collector(*cells, None))  # they were not worked out yet
    uses.publish(Uses())
    assert len(list(free_collector(*cells, None))) == 4


def test_instances_are_billed_by_their_part_of_the_memory() -> None:
    small = Instance("MIG-0-1", 1, 0, "1g.18gb", GPUS[UUIDS[0]].memory_bytes // 8)
    large = Instance("MIG-0-2", 2, 0, "3g.71gb", GPUS[UUIDS[0]].memory_bytes // 2)
    gpus = {UUIDS[0]: replace(GPUS[UUIDS[0]], mig_enabled=True, instances=(small, large))}
    holdings = (
        Holding("a", "one", "main", "nvidia.com/mig-1g.18gb", ("MIG-0-1",)),
        Holding("a", "both", "main", "nvidia.com/gpu", ("MIG-0-1", "MIG-0-2")),
        Holding("a", "gone", "main", "nvidia.com/mig-2g.35gb", ("MIG-0-3",)),
    )
    shares = shares_of(Record(holdings, ()), gpus)
    assert [(each.pod, each.gpu, each.mode, each.held) for each in shares] == [
        ("one", UUIDS[0], Mode.MIG, 0.125),
        ("both", UUIDS[0], Mode.MIG, 0.625),
    ]
    assert shares[0].memory_limit == small.memory_bytes
    # Compute instances of one GPU instance have its memory together: it is billed once.
    size = GPUS[UUIDS[0]].memory_bytes // 2
    three = tuple(
        Instance(f"MIG-1-{n}", 1, n, "1c.3g.71gb", size, slices=3, compute_slices=1) for n in range(3)
    )
    name = "nvidia.com/mig-1c.3g.71gb"
    apart = tuple(Holding("a", each.uuid, "main", name, (each.uuid,)) for each in three)
    gpus[UUIDS[0]] = replace(gpus[UUIDS[0]], instances=three)
    charged = shares_of(Record(apart, ()), gpus)
    assert 0.499 < sum(each.held or 0.0 for each in charged) <= 0.5
    assert {each.memory_limit for each in charged} == {size}
    # NVML says nothing of the work of their processes.
    sample = Sample(0.5, None, 1, 2, None, None, processes=(), busy=())
    assert attribute(shares, sample, {}, {}).uses[0].utilization_grade is Attribution.ALLOCATED
