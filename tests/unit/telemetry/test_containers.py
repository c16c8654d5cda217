"""Figures of containers from sampler, records and processes together, and the page they make."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from agent.holdings.process_owners import Owners, ProcessUnreadable, container_of_process
from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.modes import Mode
from agent.simulator.state import ProcessKind
from agent.telemetry import definitions as d
from agent.telemetry.container_use import ContainerUse, ContainerWatch, Uses, above_limit
from agent.telemetry.containers import Attribution, ContainerShare, Use
from agent.telemetry.rendering import written
from agent.telemetry.sampler import Span
from agent.telemetry.series import COMPATIBLE, compatible_series, container_series
from tests.pods import seen
from tests.unit.telemetry.agents import Parts
from tests.unit.telemetry.pages import OPENMETRICS, page, value
from tests.unit.telemetry.test_sampler import long_periods, rounds, running

UID, CONTAINER = "0b2e1fd0-3b0c-4d4a-9a6c-5ab3c1f6b9b1", "ab" * 32
MIB = 1 << 20


def in_pod(proc: Path, pid: int, uid: str = UID, container: str = CONTAINER) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/{container}\n")


class Node:
    """Parts of an agent with one container on the first two GPUs."""

    def __init__(self, folder: Path) -> None:
        self.parts = Parts("dgx-h200")
        self.uuids = self.parts.scan()
        self.pods = {UID: seen("team", "train", {CONTAINER: "main"})}
        ids = (*(f"{self.uuids[0]}::sc{n}" for n in range(25)), f"{self.uuids[0]}::sm1")
        self.holdings: Cell[Record | None] = Cell(
            Record((Holding("team", "train", "main", "nvidia.com/mps-core", ids),), ())
        )
        self.watch = ContainerWatch(
            self.parts.inventory.snapshot,
            self.parts.sampler.samples,
            self.holdings,
            Owners(folder),
            lambda: self.pods,
        )
        self.parts.sources = _with_uses(self.parts, self.watch)

    async def look(self) -> None:
        async with running(self.parts.sampler):
            samples = await rounds(self.parts.sampler)
        await self.watch.look(samples)


def _with_uses(parts: Parts, watch: ContainerWatch):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from dataclasses import replace

    return replace(parts.sources, uses=watch.uses)


async def test_figures_from_the_records_on_and_gone_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_periods(monkeypatch)
    node = Node(tmp_path)
    labels = {
        "namespace": "team",
        "pod": "train",
        "container": "main",
        "gpu": node.uuids[0],
        "index": "0",
        "mode": "mps",
    }
    await node.look()
    text = await page(node.parts.sources)
    graded = {**labels, "attribution": "measured"}
    assert value(text, "gpu_agent_container_memory_used_bytes", **graded) == 0
    assert value(text, "gpu_agent_container_memory_limit_bytes", **labels) == 1024 * MIB
    assert value(text, "gpu_agent_container_core_limit_ratio", **labels) == 0.25

    in_pod(tmp_path, 4711)
    node.parts.machine.processes.start(0, 4711, ProcessKind.MPS, 600)
    node.parts.machine.processes.work(4711, 40)
    await node.look()
    node.parts.machine.processes.stop(4711)
    text = await page(node.parts.sources, OPENMETRICS)
    families = {family.name for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]
    assert "gpu_agent_container_utilization_ratio" in families
    assert f'attribution="measured"}} {600 * MIB}' in text
    assert re.search(r'gpu_agent_container_utilization_ratio{.*attribution="measured"} 0\.4', text)

    await node.look()
    text = await page(node.parts.sources)
    assert value(text, "gpu_agent_container_memory_used_bytes", **graded) == 0
    assert value(text, "gpu_agent_container_memory_used_max_bytes", **graded) == 600 * MIB

    node.holdings.publish(Record((), ()))
    await node.look()
    assert "gpu_agent_container_memory_used_bytes{" not in await page(node.parts.sources)


async def test_pods_that_finished_hold_nothing_whatever_old_kubelets_list(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.pods = {UID: seen("team", "train", {}, finished=True)}
    await node.look()
    assert node.watch.uses.value.containers == ()


def test_processes_are_looked_up_once_and_forgotten_with_the_last_question(tmp_path: Path) -> None:
    in_pod(tmp_path, 7)
    owners = Owners(tmp_path)
    first = owners.of([7, 8])
    assert set(first) == {7}
    assert first[7] is not None
    assert first[7].pod_uid == UID
    (tmp_path / "7" / "cgroup").write_text("0::/init.scope\n")
    assert owners.of([7]) == first
    assert owners.of([]) == {}
    assert owners.of([7]) == {7: None}
    with pytest.raises(ProcessUnreadable, match="process 8 cannot be looked up"):
        container_of_process(8, tmp_path)


def test_pods_above_what_they_were_given_are_those_that_the_driver_tells_of() -> None:
    def one(pod: str, mebibytes: int, grade: Attribution, mode: Mode = Mode.MPS) -> ContainerUse:
        share = ContainerShare("team", pod, "main", "GPU-0", 0, mode, 0.5, 512 * MIB)
        return ContainerUse(Use(share, mebibytes * MIB, grade), Span(0, 0), Span(0, 0))

    uses = Uses(
        (
            one("full", 512, Attribution.MEASURED),
            one("greedy", 513, Attribution.MEASURED),
            one("guessed", 600, Attribution.ESTIMATED),
            one("fraction", 600, Attribution.MEASURED, Mode.VGPU),
        )
    )
    assert above_limit(uses, Mode.MPS) == {"GPU-0": {"team/greedy"}}
    assert above_limit(Uses(), Mode.MPS) == {}


def use(container: str, gpu: int, cores: float | None, utilization: float, memory: int) -> ContainerUse:
    share = ContainerShare("team", 'po"d', container, f"GPU-{gpu}", gpu, Mode.VGPU, cores, 512 * MIB)
    own = Use(share, memory * MIB, Attribution.MEASURED, utilization, Attribution.ESTIMATED, (1,))
    return ContainerUse(own, Span(0, memory * MIB), Span(0.5, 0.75))


def test_gpu_managers_names_and_scales() -> None:
    uses = [use("a", 0, 0.5, 0.25, 64), use("a", 1, 0.5, 0.5, 32), use("b", 1, None, 0, 0)]
    text = b"".join(written(COMPATIBLE, compatible_series(uses, "n1"))).decode()
    who = 'pod_name="po\\"d",namespace="team",node="n1",container_name="a"'
    lines = text.splitlines()
    for line in (
        f'container_gpu_utilization{{{who},gpu="gpu0"}} 25.0',
        f'container_gpu_utilization{{{who},gpu="gpu1"}} 50.0',
        f'container_gpu_utilization{{{who},gpu="total"}} 75.0',
        f'container_gpu_memory_total{{{who},gpu_memory="total"}} 96.0',
        f'container_request_gpu_utilization{{{who},req_of_gpu="total"}} 1.0',
        f'container_request_gpu_memory{{{who},req_of_gpu_memory="total"}} 1024.0',
    ):
        assert line in lines
    assert not any('req_of_gpu="gpu' in line for line in lines)


def container_page(uses: Sequence[ContainerUse]) -> str:
    return b"".join(written(d.ALL, container_series(uses))).decode()


def test_a_limit_that_was_not_asked_for_is_left_out() -> None:
    text = container_page([use("b", 1, None, 0, 0)])
    assert "gpu_agent_container_core_limit_ratio{" not in text
    assert 'gpu_agent_container_memory_limit_bytes{namespace="team",pod="po\\"d",container="b"' in text
    assert "# UNIT" not in text


READ, UNREAD = (0.9, Attribution.MEASURED), (0.0, Attribution.ALLOCATED)
GUESSED = (0.3, Attribution.ESTIMATED)


async def windowed(tmp_path: Path, readings: Sequence[tuple[float, Attribution]]) -> ContainerUse:
    """The last use of a container after one reading a second, utilization and memory alike."""
    watch = Node(tmp_path).watch
    share = ContainerShare("team", "train", "main", "GPU-0", 0, Mode.PGPU, 1.0, 80 << 30)
    found = None
    for second, (ratio, grade) in enumerate(readings):
        use = Use(share, round(ratio * 100) * MIB, grade, ratio, grade, (1,))
        found = watch.windowed(use, float(second))
    assert found
    return found


async def test_a_gpu_that_cannot_be_read_is_no_use_of_0(tmp_path: Path) -> None:
    halfway = await windowed(tmp_path, [READ] * 30 + [UNREAD] * 30)
    assert halfway.utilization
    assert halfway.utilization.mean == pytest.approx(0.9)
    assert halfway.utilization.most == 0.9
    assert halfway.memory == Span(90 * MIB, 90 * MIB)
    text = container_page([halfway])
    assert re.search(r'gpu_agent_container_utilization_mean_ratio{.*attribution="measured"} 0\.[89]', text)
    assert re.search(r'gpu_agent_container_utilization_max_ratio{.*attribution="measured"} 0\.9', text)
    assert f'attribution="measured"}} {90 * MIB}' in text
    # The newest reading is missing; the limits stand.
    for name in ("utilization_ratio", "memory_used_bytes", "processes"):
        assert f"gpu_agent_container_{name}{{" not in text
    assert "gpu_agent_container_memory_limit_bytes{" in text

    long_gone = await windowed(tmp_path, [READ] * 30 + [UNREAD] * 80)
    assert (long_gone.utilization, long_gone.memory) == (None, None)
    text = container_page([long_gone])
    assert "_ratio{" not in text.replace("core_limit_ratio{", "")
    assert "gpu_agent_container_memory_used" not in re.sub(r"#.*", "", text)
    assert "gpu_agent_container_memory_limit_bytes{" in text


async def test_memory_of_others_is_missing_while_a_gpu_cannot_be_read(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.parts.machine.processes.start(0, 4711, ProcessKind.COMPUTE, 600)  # a process that nobody knows
    await node.look()
    uuid = node.uuids[0]
    assert node.watch.uses.value.other[uuid] == (0, 600 * MIB)
    samples = node.parts.sampler.samples.value
    taken = samples.taken[uuid]
    hidden = replace(taken, sample=replace(taken.sample, processes=None))
    for unread in ({uuid: hidden}, {}):
        await node.watch.look(replace(samples, taken=unread))
        assert uuid not in node.watch.uses.value.other


@pytest.mark.parametrize(
    ("readings", "grade"),
    [
        ([READ], Attribution.MEASURED),
        ([READ] * 5 + [GUESSED] + [READ] * 5, Attribution.ESTIMATED),
        ([GUESSED] + [READ] * 80, Attribution.MEASURED),
        ([GUESSED] * 5 + [UNREAD] * 5, Attribution.ESTIMATED),
        ([UNREAD] * 5, Attribution.ALLOCATED),
    ],
)
async def test_means_and_maxima_carry_the_weakest_grade(
    tmp_path: Path, readings: Sequence[tuple[float, Attribution]], grade: Attribution
) -> None:
    found = await windowed(tmp_path, readings)
    assert (found.utilization_grade, found.memory_grade) == (grade, grade)


def test_gpu_managers_total_is_missing_while_a_gpu_cannot_be_read() -> None:
    share = ContainerShare("team", "p", "a", "GPU-1", 1, Mode.VGPU, 0.5, 512 * MIB)
    uses = [use("a", 0, 0.5, 0.25, 64), ContainerUse(Use(share), None, None)]
    uses[0] = replace(uses[0], use=replace(uses[0].use, share=replace(share, gpu="GPU-0", index=0)))
    text = b"".join(written(COMPATIBLE, compatible_series(uses, "n1"))).decode()
    assert 'gpu="gpu0"} 25.0' in text
    assert 'gpu="gpu1"' not in text
    assert ',gpu="total"' not in text
    assert 'req_of_gpu="total"} 1.0' in text
