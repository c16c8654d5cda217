"""Limits of vGPU containers that are built when they are first needed, once, whichever room asks for them."""

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec
import pytest

from agent.app.parts import Tasks
from agent.app.vgpu_limits import VgpuLimits, build_limits
from agent.kit.cell import Cell
from agent.kit.supervise import Supervisor
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.model.ledger import PairMember
from agent.model.modes import Assignment, GpuMode, Mode
from agent.pairing.pair_rules import Grant
from agent.settings import HostSettings, Modes, Settings, Vgpu

if TYPE_CHECKING:
    from agent.app.build_isolation import LimitParts

GPU = "GPU-1"
ANSWER = Allocation(cdi_devices=("a/b=c",))


class Parts:
    """Limits that say how often they were built, and for whom resizes are followed."""

    def __init__(self, takes: float = 0.0, *problems: OSError) -> None:
        """`problems`: building fails with each of them once."""
        self.built = 0
        self._problems = [*problems]
        self.followed: list[object] = []
        self.takes = takes

    async def build(self) -> "LimitParts":
        await anyio.sleep(self.takes)
        if self._problems:
            raise self._problems.pop()
        self.built += 1
        return cast("LimitParts", self)

    async def fence(self, member: PairMember, grant: Grant) -> Allocation:
        return ANSWER

    def units_grown(self, uuid: str) -> frozenset[str]:
        return frozenset({f"{uuid}::m1"})

    def follow_resizes(self, context: object, shares: object) -> None:
        self.followed.append(shares)


def _limits(parts: Parts, mode: Mode = Mode.PGPU) -> tuple[VgpuLimits, Cell[Assignment]]:
    modes = Cell(Assignment({GPU: GpuMode(mode)}))
    return VgpuLimits(modes, cast("Callable[[], Awaitable[LimitParts]]", parts.build)), modes


async def _allocate(limits: VgpuLimits) -> Allocation:
    return await limits(PairMember.MEMORY, cast("Grant", SimpleNamespace(container="main")))


async def test_nothing_is_built_before_a_gpu_is_offered_as_vgpu() -> None:
    parts = Parts()
    limits, modes = _limits(parts)
    async with anyio.create_task_group() as group:
        context: Any = SimpleNamespace(tasks=Tasks(Supervisor(), group))
        limits.follow_resizes(context, cast("Any", "shares"))
        await anyio.wait_all_tasks_blocked()
        assert (parts.built, parts.followed, limits.units_grown(GPU)) == (0, [], frozenset())
        assert (limits.problem, limits.enforced(), limits.allotted()) == (None, "no", {})
        assert not any(limits.fences().values())
        modes.publish(Assignment({GPU: GpuMode(Mode.VGPU)}))
        await anyio.wait_all_tasks_blocked()
        assert (parts.built, parts.followed) == (1, ["shares"])
        assert limits.units_grown(GPU) == {f"{GPU}::m1"}
        group.cancel_scope.cancel()


async def test_containers_that_come_first_have_them_built_once() -> None:
    parts = Parts(takes=0.01)
    limits, _ = _limits(parts)
    answers: list[Allocation] = []

    async def allocate() -> None:
        answers.append(await _allocate(limits))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(allocate)
    assert (answers, parts.built) == ([ANSWER] * 5, 1)


async def test_an_allocate_that_is_cut_off_leaves_them_whole() -> None:
    parts = Parts(takes=0.01)
    limits, _ = _limits(parts)
    async with anyio.create_task_group() as group:
        group.start_soon(_allocate, limits)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert parts.built == 1
    assert await _allocate(limits) == ANSWER
    assert parts.built == 1


async def test_building_that_failed_is_done_again() -> None:
    limits, _ = _limits(Parts(0.0, OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        await _allocate(limits)
    assert await _allocate(limits) == ANSWER


async def test_building_that_failed_does_not_end_the_agent() -> None:
    parts = Parts(0.0, OSError("no space"))
    limits, _ = _limits(parts, Mode.VGPU)
    supervisor = Supervisor(first_pause=0.01)
    async with anyio.create_task_group() as group:
        context: Any = SimpleNamespace(tasks=Tasks(supervisor, group))
        limits.follow_resizes(context, cast("Any", "shares"))
        with anyio.fail_after(10):
            while not parts.followed:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert (parts.built, parts.followed) == (1, ["shares"])
    assert supervisor.states["vgpu limits"].last_error == "OSError: no space"


async def test_building_that_hangs_is_given_up_and_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is shielded from the end of its Allocate, so nothing else would end it.

    The refusal is one that the kubelet passes on to the pod, not an internal error of the agent.
    """
    monkeypatch.setattr("agent.app.vgpu_limits.BUILD_SECONDS", 0.01)
    parts = Parts(takes=math.inf)
    limits, _ = _limits(parts)
    with anyio.fail_after(10), pytest.raises(Refused) as refused:
        await _allocate(limits)
    assert refused.value.reason is Reason.UNAVAILABLE
    assert str(refused.value) == (
        "the memory of container main cannot be capped: the limits of vGPU containers were not there within "
        "0.01 s; look whether the folders host.state and host.run answer"
    )
    parts.takes = 0.0
    assert await _allocate(limits) == ANSWER


@pytest.mark.parametrize("allowed", [True, False])
async def test_limits_are_there_for_a_mode_that_a_reload_may_allow(tmp_path: Path, allowed: bool) -> None:
    host = HostSettings(state=str(tmp_path / "state"), run=str(tmp_path / "run"))
    settings = msgspec.structs.replace(
        Settings(), host=host, modes=Modes(vgpu=allowed), vgpu=Vgpu(enforcement="strict")
    )
    modes = Cell(Assignment())
    context: Any = SimpleNamespace(
        core=SimpleNamespace(settings=settings), plugins=SimpleNamespace(modes=modes)
    )
    assert isinstance(await build_limits(context), VgpuLimits)
