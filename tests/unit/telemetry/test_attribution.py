"""The container that uses a GPU: by process, by elimination, by limits."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from agent.model.cgroup import ContainerRef
from agent.model.gpu import Gpu
from agent.model.holding import Holding, Record
from agent.model.modes import Mode
from agent.model.pod import Pod
from agent.nvml.port import GpuProcess, Sample
from agent.telemetry.containers import Attributed, Attribution, ContainerShare, attribute, shares_of
from tests.pods import seen

GIB = 1 << 30
UUID = "GPU-0"
GPU = Gpu(UUID, 0, 0, "0000:1b:00.0", "NVIDIA H200", 140 * GIB, (9, 0))
MEASURED, ESTIMATED, ALLOCATED = Attribution.MEASURED, Attribution.ESTIMATED, Attribution.ALLOCATED


def share(
    pod: str, cores: float | None = 0.5, memory: int = 10, mode: Mode = Mode.VGPU, name: str = "main"
) -> ContainerShare:
    return ContainerShare("default", pod, name, UUID, 0, mode, cores, memory * GIB)


def ref(pod: str, container: str = "main") -> ContainerRef:
    return ContainerRef(f"uid-{pod}", f"{pod}-{container}")


def known(*pods: str, containers: tuple[str, ...] = ("main",)) -> Mapping[str, Pod]:
    return {
        f"uid-{pod}": seen("default", pod, {f"{pod}-{name}": name for name in containers}) for pod in pods
    }


def sample(*processes: GpuProcess, used: int = 0, device: float | None = 0.0) -> Sample:
    return Sample(device, 0.0, used * GIB, 140 * GIB, 100.0, 40.0, processes=processes)


def process(pid: int, gib: int) -> GpuProcess:
    return GpuProcess(pid, gib * GIB)


def memory(found: Attributed) -> list[tuple[float, Attribution]]:
    return [(use.memory / GIB, use.memory_grade) for use in found.uses]


def work(found: Attributed) -> list[tuple[float, Attribution]]:
    return [(round(use.utilization, 6), use.utilization_grade) for use in found.uses]


def test_each_container_gets_its_own_processes() -> None:
    shares = [share("a"), share("b", name="x"), share("b", name="y")]
    pods = {**known("a"), **known("b", containers=("x", "y"))}
    owners = {1: ref("a"), 2: ref("a"), 3: ref("b", "y"), 4: None}
    found = attribute(
        shares,
        sample(process(1, 2), process(2, 3), process(3, 4), process(4, 1)),
        {1: 0.3, 2: 0.0, 3: 0.4, 4: 0.3},
        owners,
        pods,
    )
    assert memory(found) == [(5, MEASURED), (0, MEASURED), (4, MEASURED)]
    # Each sample of the driver was put down to one of them, and limits divide their sum.
    assert work(found) == [(0.35, ESTIMATED), (0, MEASURED), (0.35, ESTIMATED)]
    assert [use.processes for use in found.uses] == [2, 0, 1]
    assert [use.working for use in found.uses] == [1, 0, 1]
    assert (found.foreign_memory, found.unknown_memory, found.others_work) == (GIB, 0, True)


@pytest.mark.parametrize("busy", [{1: 0.52}, {1: 0.3, 2: 0.22}, {2: 0.52}])
def test_of_several_that_take_turns_only_the_sum_is_measured(busy: Mapping[int, float]) -> None:
    """An H200 names one of them, and another in the next second."""
    shares = [share("a", 0.3), share("b", 0.7), share("idle")]
    listed, owners = sample(process(1, 2), process(2, 3)), {1: ref("a"), 2: ref("b")}
    found = attribute(shares, listed, busy, owners, known("a", "b", "idle"))
    assert work(found) == [(0.156, ESTIMATED), (0.364, ESTIMATED), (0, MEASURED)]
    assert not found.others_work
    idle = attribute(shares, listed, {}, owners, known("a", "b", "idle"))
    assert work(idle) == [(0, MEASURED)] * 3


@pytest.mark.parametrize("busy", [{1: 0.8}, {1: 0.8, 9: 0.0}])
def test_an_idle_process_of_the_host_ends_no_measure_and_may_have_worked_all_the_same(
    busy: Mapping[int, float],
) -> None:
    """Bills go by the one, and corrections of shares by the other."""
    listed, owners = sample(process(1, 100), process(9, 1)), {1: ref("a"), 9: None}
    found = attribute([share("a", 1.0, mode=Mode.PGPU)], listed, busy, owners, known("a"))
    assert work(found) == [(0.8, MEASURED)]
    assert found.others_work
    found = attribute([share("a")], listed, {**busy, 9: 0.1}, owners, known("a"))
    assert work(found) == [(0.8, ESTIMATED)]
    # One whose owner nobody knows may be a container's.
    found = attribute([share("a")], listed, busy, {1: ref("a")}, known("a"))
    assert work(found) == [(0.8, ESTIMATED)]


def test_whose_memory_is_unknown_is_there_all_the_same() -> None:
    listed = sample(process(1, 2), GpuProcess(2, None), used=4)
    found = attribute([share("a"), share("b")], listed, {1: 0.5}, {1: ref("a"), 2: ref("b")}, known("a", "b"))
    assert [use.pids for use in found.uses] == [(1,), (2,)]
    assert not found.others_work
    hidden = attribute([share("a")], replace(listed, processes=None), {1: 0.5}, {1: ref("a")}, known("a"))
    assert hidden.others_work


def test_processes_of_one_container_are_measured_together() -> None:
    shares, listed = [share("a"), share("idle")], sample(process(1, 2), process(2, 3))
    found = attribute(shares, listed, {2: 0.5}, {1: ref("a"), 2: ref("a")}, known("a", "idle"))
    assert work(found) == [(0.5, MEASURED), (0, MEASURED)]


def test_before_the_first_call_a_container_uses_nothing_and_that_is_measured() -> None:
    found = attribute([share("a")], sample(device=0.0), {}, {})
    assert memory(found) == [(0, MEASURED)]
    assert work(found) == [(0, MEASURED)]


def test_a_gpu_that_is_not_read_leaves_what_was_allocated() -> None:
    found = attribute([share("a")], None, {}, {})
    assert memory(found) == [(0, ALLOCATED)]
    assert work(found) == [(0, ALLOCATED)]


def test_without_process_lists_the_gpus_figures_are_shared_out_by_limits() -> None:
    shares = [share("a", 0.2, 10), share("b", 0.6, 30)]
    bare = replace(sample(used=8, device=0.4), processes=None)
    found = attribute(shares, bare, None, {})
    assert memory(found) == [(2, ESTIMATED), (6, ESTIMATED)]
    assert work(found) == [(0.1, ESTIMATED), (0.3, ESTIMATED)]


def test_an_estimate_stays_below_the_limit() -> None:
    bare = replace(sample(used=100, device=1.0), processes=None)
    found = attribute([share("a", 0.2, 10), share("b", 0.1, 10)], bare, None, {})
    assert memory(found) == [(10, ESTIMATED), (10, ESTIMATED)]
    assert work(found) == [(0.2, ESTIMATED), (0.1, ESTIMATED)]


def test_a_process_of_nobody_known_is_shared_out_among_those_without_one() -> None:
    shares = [share("a"), share("b", 0.5, 10), share("c", 0.5, 30)]
    found = attribute(
        shares, sample(process(1, 5), process(9, 8)), {1: 0.3, 9: 0.4}, {1: ref("a")}, known("a", "b", "c")
    )
    assert memory(found) == [(5, MEASURED), (2, ESTIMATED), (6, ESTIMATED)]
    assert work(found) == [(0.233333, ESTIMATED)] * 3
    assert found.unknown_memory == 8 * GIB


def test_without_an_api_server_a_sole_holder_is_known_by_elimination() -> None:
    owners = {1: ContainerRef("whatever", "0123")}
    found = attribute([share("a", 1.0, 140, Mode.PGPU)], sample(process(1, 7)), {1: 0.5}, owners)
    assert memory(found) == [(7, MEASURED)]
    assert work(found) == [(0.5, MEASURED)]
    two = attribute([share("a"), share("b")], sample(process(1, 8)), {1: 0.5}, owners)
    assert [grade for _, grade in memory(two)] == [ESTIMATED, ESTIMATED]
    # The cache knows one of the two: the process is of the other.
    other = attribute([share("a"), share("b")], sample(process(1, 8)), {1: 0.5}, owners, known("a"))
    assert memory(other) == [(0, MEASURED), (8, MEASURED)]


def test_a_process_of_a_pod_that_holds_nothing_here_is_not_put_on_another() -> None:
    found = attribute([share("a")], sample(process(1, 7)), {1: 0.5}, {1: ref("z")}, known("a", "z"))
    assert found.unknown_memory == 7 * GIB
    assert [grade for _, grade in memory(found)] == [ESTIMATED]


def test_mps_clients_have_their_own_memory_and_the_servers_work_by_caps() -> None:
    shares = [share("a", 0.3, 10, Mode.MPS), share("b", 0.1, 10, Mode.MPS), share("idle", 0.6, 10, Mode.MPS)]
    owners = {1: ref("a"), 2: ref("b"), 99: None}
    listed = sample(GpuProcess(1, GIB, True), GpuProcess(2, 2 * GIB, True), process(99, 1), device=0.2)
    found = attribute(shares, listed, {99: 0.2}, owners, known("a", "b", "idle"))
    assert memory(found) == [(1, MEASURED), (2, MEASURED), (0, MEASURED)]
    assert work(found) == [(0.15, ESTIMATED), (0.05, ESTIMATED), (0, MEASURED)]
    # A driver without figures by process: the GPU's own figure.
    silent = attribute(shares, listed, {}, owners, known("a", "b", "idle"))
    assert work(silent) == work(found)
    # A driver with figures of each client.
    told = attribute(shares, listed, {1: 0.25, 2: 0.05}, owners, known("a", "b", "idle"))
    assert work(told) == [(0.25, MEASURED), (0.05, MEASURED), (0, MEASURED)]


@pytest.mark.parametrize(
    ("resource_ids", "expected"),
    [
        ((UUID,), (Mode.PGPU, 1.0, 140 * GIB)),
        ((f"{UUID}::r1",), (Mode.PGPU, 1.0, 140 * GIB)),
        (
            (*tuple(f"{UUID}::c{n}" for n in range(30)), f"{UUID}::m0", f"{UUID}::m9"),
            (Mode.VGPU, 0.3, GIB // 2),
        ),
        (tuple(f"{UUID}::c{n}" for n in range(100)), (Mode.VGPU, 1.0, 140 * GIB)),
        ((f"{UUID}::m0",), (Mode.VGPU, None, GIB // 4)),
        ((*tuple(f"{UUID}::sc{n}" for n in range(15)), f"{UUID}::sm4"), (Mode.MPS, 0.15, GIB)),
    ],
)
def test_shares_from_the_kubelets_records(resource_ids: tuple[str, ...], expected: object) -> None:
    holdings = (
        Holding("default", "p", "main", "any", resource_ids),
        Holding("default", "q", "main", "other.io/fpga", ("fpga-1", "GPU-elsewhere")),
    )
    (found,) = shares_of(Record(holdings, ()), {UUID: GPU})
    assert (found.mode, found.core_limit, found.memory_limit) == expected
