"""In which mode a GPU is taken over that containers hold or use, or that ended ones have entries of."""

import anyio
import pytest

from agent.model.holding import GpuHolder, Holding, Source
from agent.model.modes import GpuMode, Mode
from agent.modes.planner import Phase, taken_over
from agent.modes.switcher import NAMELESS
from tests.unit.modes.nodes import Daemon, Kubelet, gpu, switching

PLAIN = Holding("default", "runs", "main", "nvidia.com/gpu", ("GPU-1",))
SHARE = Holding("default", "runs", "main", "tencent.com/vcuda-core", ("GPU-1::c0",))
# Of a pod that has ended, by a checkpoint that names it still; the API server has not said whose it is.
LEFT = Holding("", "pod with UID u", "main", "nvidia.com/gpu", ("GPU-1::r3",), Source.CHECKPOINT)


def holder(holding: Holding) -> GpuHolder:
    mode = Mode.VGPU if holding is SHARE else Mode.PGPU
    return GpuHolder(mode, replica="::r" in holding.ids[0], holding=holding)


@pytest.mark.parametrize("wanted", [GpuMode(Mode.VGPU), GpuMode(Mode.PGPU), GpuMode(Mode.PGPU, replicas=4)])
@pytest.mark.parametrize("named", ["", "default"])
@pytest.mark.parametrize("lives", [SHARE, PLAIN])
def test_it_is_that_of_whom_the_kubelet_lists(lives: Holding, named: str, wanted: GpuMode) -> None:
    """Storm 10000085: units of a pod that ran were on no list, and a kubelet that restarts ends it then."""
    left = Holding(named, *("ended", "main", LEFT.resource), LEFT.ids, LEFT.source)
    found = taken_over([holder(left), holder(lives)], wanted)
    assert found == GpuMode(holder(lives).mode, replicas=1)


def test_where_nobody_is_listed_it_is_that_of_those_with_a_name() -> None:
    share = Holding("default", "init", "main", SHARE.resource, SHARE.ids, Source.CHECKPOINT)
    found = taken_over([holder(LEFT), GpuHolder(Mode.VGPU, replica=False, holding=share)], GpuMode(Mode.PGPU))
    assert found == GpuMode(Mode.VGPU)
    assert taken_over([holder(LEFT)], GpuMode(Mode.VGPU)) == GpuMode(Mode.PGPU, replicas=4)


@pytest.mark.parametrize("named", [False, True])
async def test_after_a_restart_what_is_in_use_tells_the_mode_of_a_gpu_that_nobody_is_named_to_hold(
    named: bool,
) -> None:
    """Storm 20000106: a kubelet that lost its records listed nobody, with the API server away."""
    daemon = Daemon()
    daemon.used.add(gpu(0).uuid)
    daemon.fail = "a server of the dead daemon still runs"
    async with switching(gpu(0), gpu(1), wings={Mode.MPS: daemon}, first=Mode.MPS) as node:
        await node.reach("mps-", "off")
        with anyio.fail_after(10):
            await node.switcher.state.wait_for(lambda state: state.phase is Phase.FAILED)
        node.want(Mode.PGPU)
        await node.reach("mps-", "pgpu")
        with anyio.fail_after(10):
            await node.switcher.state.wait_for(lambda state: NAMELESS in state.message)
        if named:
            node.kubelet.hold("runs", "nvidia.com/mps-core", f"{gpu(0).uuid}::sc3")
            with anyio.fail_after(10):
                await node.switcher.state.wait_for(lambda state: "default/runs" in state.message)
            node.kubelet.end("runs")  # others may not be named yet
        await anyio.sleep(0.6)  # a look
        assert node.modes() == ["mps-", "pgpu"]
        assert "down 0" not in daemon.log
        daemon.used.clear()
        await node.reach("pgpu", "pgpu")
        assert "down 0" in daemon.log


async def test_what_is_granted_while_it_is_asked_who_is_at_work_is_held() -> None:
    """A reading that began before shows no holder, and by its end the grant is in a newer one."""
    daemon = Daemon()
    daemon.used.add(gpu(0).uuid)
    async with switching(gpu(0), gpu(1), wings={Mode.MPS: daemon}, first=Mode.PGPU) as node:
        await node.reach("mps-", "pgpu")
        node.lists.granted.add(gpu(1).uuid)

        def shown() -> None:
            if node.lists.granted:
                node.lists.granted.clear()
                node.kubelet.hold("new", "nvidia.com/gpu", gpu(1).uuid)

        node.want(Mode.MPS)
        await node.reach("mps", "pgpu-")
        daemon.asked = shown
        with anyio.fail_after(10):
            while node.lists.granted:
                await anyio.sleep(0.01)
        await anyio.sleep(0.6)  # a look
        assert node.modes() == ["mps", "pgpu-"]
        node.kubelet.end("new")
        await node.reach("mps", "mps")


async def test_what_is_in_use_by_nobody_that_is_named_is_offered_as_it_is_wanted() -> None:
    daemon = Daemon()
    daemon.used.add(gpu(0).uuid)
    async with switching(gpu(0), wings={Mode.MPS: daemon}, first=Mode.MPS) as node:
        await node.reach("mps")
        assert daemon.log == ["up 0"]


@pytest.mark.parametrize("sees", [False, True])
async def test_one_that_is_named_from_the_first_says_nothing_of_others_at_work(*, sees: bool) -> None:
    """A kubelet without its records names those that it has admitted since; and a look may fail."""
    daemon, kubelet = Daemon(), Kubelet()
    daemon.used.add(gpu(0).uuid)
    kubelet.hold("named", "nvidia.com/mps-core", f"{gpu(0).uuid}::sc3")
    async with switching(gpu(0), wings={Mode.MPS: daemon}, kubelet=kubelet, first=Mode.PGPU) as node:
        await node.reach("mps-")
        daemon.sees = sees
        kubelet.end("named")
        await anyio.sleep(0.6)  # a look
        assert (node.modes(), daemon.log) == (["mps-"], ["up 0"])
        daemon.sees = True
        daemon.used.clear()
        await node.reach("pgpu")


async def test_a_gpu_of_which_nobody_can_say_whether_it_is_used_is_as_free_as_the_record_says() -> None:
    daemon = Daemon()
    daemon.used.add(gpu(0).uuid)
    daemon.sees = False
    async with switching(gpu(0), wings={Mode.MPS: daemon}, first=Mode.PGPU) as node:
        await node.reach("pgpu")
