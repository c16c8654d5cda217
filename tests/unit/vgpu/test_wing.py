"""Limits of vGPU containers begin when they are first needed, once, whichever room asks for them."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from anyio.abc import TaskGroup

from agent.kit.tasks import Cell, Supervisor
from agent.kubelet.wire import Allocation, Reason, Refused
from agent.model.holding import Holding, PairMember
from agent.model.modes import Assignment, GpuMode, Mode
from agent.settings import HostSettings, Modes, Settings
from agent.settings import Vgpu as Configured
from agent.telemetry import definitions as d
from agent.vgpu.driver import DriverFence
from agent.vgpu.library import ELF, Copies
from agent.vgpu.room import Isolation
from agent.vgpu.wing import VgpuWing, word_of
from tests.unit.vgpu.made_up import GPU, about
from tests.wing_node import wing_node

GRANT: Any = SimpleNamespace(
    container="main",
    pod=SimpleNamespace(uid="uid", namespace="default", name="pod"),
    gpus=(GPU,),
    ids=(f"{GPU}::m1",),
    demand=SimpleNamespace(whole=0, cores=10),
)
BEGUN = ("limits", "grown units", "limit sweep", "limits published", "driver fence")


ALL = Modes()
NO_FENCES = dict.fromkeys(("driver", "library", "sweep"), False)


class Site:
    """A node with GPUs that no mode has yet."""

    def __init__(self, root: Path, modes: Modes = ALL, **configured: Any) -> None:
        self.root = root
        (root / "library.so").write_bytes(ELF)
        self.host = HostSettings(state=str(root / "state"), run=str(root / "run"), cdi=str(root / "cdi"))
        vgpu = Configured(**{"enforcement": "library", "library": str(root / "library.so"), **configured})
        self.settings = Settings(host=self.host, vgpu=vgpu, modes=modes)
        self.modes: Cell[Assignment] = Cell(Assignment())
        self.supervisor = Supervisor(first_pause=0.01)

    async def build(self) -> VgpuWing:
        return await VgpuWing.build(
            wing_node(self.settings, assignment=self.modes, supervisor=self.supervisor)
        )

    def offer(self, mode: Mode = Mode.VGPU) -> None:
        self.modes.publish(Assignment({GPU: GpuMode(mode)}))

    @property
    def files(self) -> list[str]:
        """Folders of ours on the host."""
        return sorted(each.name for each in self.root.iterdir() if each.name != "library.so")


def names(wing: VgpuWing) -> list[str]:
    """Of the tasks that the agent starts for it."""
    return [each.name for each in wing.tasks()]


def start(group: TaskGroup, site: Site, wing: VgpuWing) -> None:
    for task in wing.tasks():
        group.start_soon(site.supervisor.restarting, task.name, task.run)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def holding(pod: str) -> Holding:
    return Holding("default", pod, "main", "tencent.com/vcuda-memory", ())


async def _allocate(wing: VgpuWing) -> Allocation:
    return await wing._shares.sharing.additions(PairMember.MEMORY, GRANT, ())


def slow(monkeypatch: pytest.MonkeyPatch, takes: float, *problems: OSError) -> Counter[str]:
    """Beginning takes so many seconds, and fails with each problem once; how often it began, and ended."""
    counts: Counter[str] = Counter()
    left = [*problems]
    start: Callable[[Isolation], Awaitable[None]] = Isolation.start

    async def slowly(isolation: Isolation) -> None:
        counts["began"] += 1
        await anyio.sleep(takes)
        if left:
            raise left.pop()
        await start(isolation)
        counts["ended"] += 1

    monkeypatch.setattr(Isolation, "start", slowly)
    return counts


async def test_nothing_begins_before_a_gpu_is_offered_as_vgpu(site: Site) -> None:
    supervisor = site.supervisor
    async with anyio.create_task_group() as group:
        wing = await site.build()
        start(group, site, wing)
        site.offer(Mode.PGPU)
        await anyio.wait_all_tasks_blocked()
        assert (site.files, [*supervisor.states]) == ([], ["vgpu limits"])
        assert (wing.remarks(), wing.enforced(), wing.allotted()) == ((), "no", {})
        assert not any(wing.limits.fences().values())
        assert {each[0] for each in wing.metrics()} == {d.PAIRS, d.RESERVATIONS, d.ENFORCED}
        site.offer()
        with anyio.fail_after(10):
            while not supervisor.states.keys() >= {*BEGUN}:
                await anyio.sleep(0.01)
        assert site.files == ["run", "state"]
        assert (wing.remarks(), wing.enforced()) == ((), "memory")
        assert d.LIMITED_CONTAINERS in {each[0] for each in wing.metrics()}
        group.cancel_scope.cancel()


async def test_containers_that_come_first_have_them_begun_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = slow(monkeypatch, 0.01)
    wing = await site.build()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(_allocate, wing)
    assert counts == {"began": 1, "ended": 1}


async def test_an_allocate_that_is_cut_off_leaves_them_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = slow(monkeypatch, 0.01)
    wing = await site.build()
    async with anyio.create_task_group() as group:
        group.start_soon(_allocate, wing)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert counts == {"began": 1, "ended": 1}
    assert (await _allocate(wing)).mounts
    assert counts["began"] == 1


async def test_a_beginning_that_failed_is_made_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, 0.0, OSError("no space"))
    wing = await site.build()
    with pytest.raises(OSError, match="no space"):
        await _allocate(wing)
    assert (await _allocate(wing)).mounts


async def test_a_beginning_that_failed_does_not_end_the_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = slow(monkeypatch, 0.0, OSError("no space"))
    supervisor = site.supervisor
    site.offer()
    async with anyio.create_task_group() as group:
        wing = await site.build()
        start(group, site, wing)
        with anyio.fail_after(10):
            while not wing.limits.begun:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert counts == {"began": 2, "ended": 1}
    assert supervisor.states["vgpu limits"].last_error == "OSError: no space"


async def test_a_failure_half_way_starts_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, compute="hard")
    wing = await site.build()

    async def failing(_: DriverFence) -> None:
        raise OSError("the cgroups are not there")

    with monkeypatch.context() as patched:
        patched.setattr(DriverFence, "start", failing)
        with pytest.raises(OSError, match="the cgroups are not there"):
            await _allocate(wing)
    assert names(wing) == ["vgpu limits"]
    assert d.LIMITED_CONTAINERS not in {each[0] for each in wing.metrics()}
    await _allocate(wing)
    assert {*names(wing)} == {"compute shares", *BEGUN}
    assert len(names(wing)) == len({*names(wing)})


async def test_a_beginning_that_hangs_is_given_up_and_made_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is shielded from the end of its Allocate, so nothing else would end it.

    The refusal is one that the kubelet passes on to the pod, not an internal error of the agent.
    """
    wing = await site.build()
    with monkeypatch.context() as patched:
        patched.setattr("agent.vgpu.wing.BEGIN_SECONDS", 0.01)
        slow(patched, math.inf)
        with anyio.fail_after(10), pytest.raises(Refused) as refused:
            await _allocate(wing)
    assert refused.value.reason is Reason.UNAVAILABLE
    assert str(refused.value) == (
        "the memory of container main cannot be capped: the limits of vGPU containers were not there within "
        "0.01 s; look whether the folders host.state and host.run answer"
    )
    assert (await _allocate(wing)).mounts


@pytest.mark.parametrize("allowed", [True, False])
async def test_limits_are_there_for_a_mode_that_a_reload_may_allow(tmp_path: Path, allowed: bool) -> None:
    site = Site(tmp_path, Modes(vgpu=allowed))
    wing = await site.build()
    assert names(wing) == ["vgpu limits"]
    assert (await _allocate(wing)).mounts


async def test_without_enforcement_nothing_ever_begins(tmp_path: Path) -> None:
    site = Site(tmp_path, enforcement="off")
    wing = await site.build()
    site.offer()
    assert await _allocate(wing) == Allocation()
    assert (site.files, names(wing), wing.enforced(), wing.remarks()) == ([], [], "no", ())
    assert wing.holder_facts(holding("pod"), GPU) == {}


@pytest.mark.parametrize("enforcement", ["off", "library"])
async def test_containers_of_an_earlier_agent_have_theirs_from_the_start(
    tmp_path: Path, enforcement: str
) -> None:
    """Also once enforcement was switched off: what they have grown by is on no list."""
    site = Site(tmp_path, enforcement=enforcement)
    before = about("a")
    grown = f"{GPU}::m77"
    await anyio.to_thread.run_sync(
        Copies(Path(site.host.state)).keep, msgspec.structs.replace(before, grown=(grown,))
    )
    wing = await site.build()
    assert wing.limits.isolation.grown == {GPU: frozenset({grown})}
    assert names(wing) == [*BEGUN[: 2 if enforcement == "off" else None]]
    facts = wing.holder_facts(holding("a"), GPU)
    assert facts.get("limits", {}).get("memoryBytes") == (
        None if enforcement == "off" else before.memory_bytes
    )


@pytest.mark.parametrize(
    ("fence", "word"), [("library", "memory"), ("driver", "memory"), ("sweep", "no"), (None, "no")]
)
def test_vgpu_says_that_memory_alone_is_enforced(fence: str | None, word: str) -> None:
    assert word_of(NO_FENCES | ({fence: True} if fence else {}), computes=False) == word


def test_with_shares_of_compute_vgpu_is_enforced_where_the_library_is() -> None:
    assert word_of(NO_FENCES | {"library": True}, computes=True) == "yes"
    assert word_of(NO_FENCES | {"driver": True}, computes=True) == "memory"
    assert word_of(NO_FENCES | {"sweep": True}, computes=True) == "no"
