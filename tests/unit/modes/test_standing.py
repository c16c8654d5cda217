"""Requests that cannot be obeyed, restarts, gates, and the end: what stood before stays in force."""

from pathlib import Path

import anyio
import anyio.lowlevel

from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.node_inventory import Entry, everywhere
from agent.modes.desired import Desired, LastRequest, ModeCatalog
from agent.modes.planner import Phase
from tests.unit.modes.nodes import Daemon, Kubelet, gpu, switching
from tests.unit.modes.test_switcher import never_in_two_modes, settle

UNKNOWN = Desired("foo", problem="label nvidia-device-enable 'foo' is unknown")
PGPU = Desired("pgpu", everywhere(Mode.PGPU))


async def test_an_unknown_word_at_start_leaves_in_force_what_was_remembered() -> None:
    async with switching(gpu(0), gpu(1), desired=UNKNOWN, standing=PGPU) as node:
        await node.reach("pgpu", "pgpu")
        await settle(node, Phase.BLOCKED)
        state = node.switcher.state.value
        assert (state.desired, state.applied) == ("foo", "pgpu")
        assert "'foo'" in state.message


async def test_pods_of_before_keep_their_gpu_sold_under_an_unknown_word() -> None:
    kubelet = Kubelet()
    kubelet.hold("old", "nvidia.com/gpu", gpu(0).uuid)
    async with switching(gpu(0), kubelet=kubelet, desired=UNKNOWN, standing=PGPU) as node:
        await node.reach("pgpu")


async def test_a_layout_that_fits_no_more_is_followed_as_far_as_it_goes() -> None:
    layout = Desired("mixed", (Entry(("0",), Mode.PGPU), Entry(("1", "7"), Mode.VGPU)))
    async with switching(gpu(0), gpu(1), desired=layout, standing=layout) as node:
        await node.reach("pgpu", "vgpu")
        await settle(node, Phase.BLOCKED)
        assert "index 7" in node.switcher.state.value.message


async def test_a_claimed_node_sells_nothing_and_an_unknown_word_does_not_change_that() -> None:
    claimed = Desired("pgpu-dra", everywhere(Mode.OFF), problem="another agent owns this node")
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.desired.publish(claimed)
        await node.reach("off")
        await settle(node, Phase.BLOCKED)
        assert node.switcher.state.value.applied == "none"
        node.desired.publish(UNKNOWN)
        await node.switcher.state.wait_for(lambda state: state.desired == "foo")
        assert node.modes() == ["off"]


async def test_a_node_that_lacks_what_comes_with_a_gpu_offers_none() -> None:
    """Until it is there: containers would be started without, and fail where nobody looks for it."""
    lacks = Cell("injection.gds is on, and this node has no /dev/nvidia-fs*")
    async with switching(gpu(0), gpu(1), desired=PGPU, lacks=lacks) as node:
        await settle(node, Phase.BLOCKED)
        assert node.modes() == ["off", "off"]
        assert "no GPU can be offered as pgpu: injection.gds is on" in node.switcher.state.value.message
        lacks.publish("")
        await node.reach("pgpu", "pgpu")
        await settle(node, Phase.APPLIED)
        lacks.publish("injection.gds is on, and this node has no /dev/nvidia-fs*")
        await node.reach("off", "off")


async def test_refuse_survives_a_restart() -> None:
    kubelet = Kubelet()
    kubelet.hold("train", "nvidia.com/gpu", gpu(1).uuid)
    desired = Desired("vgpu", everywhere(Mode.VGPU))
    async with switching(
        gpu(0), gpu(1), kubelet=kubelet, desired=desired, standing=PGPU, when_busy="refuse"
    ) as node:
        await node.reach("pgpu", "pgpu")
        await settle(node, Phase.BLOCKED)
        assert "default/train" in node.switcher.state.value.message
        kubelet.end("train")
        await node.reach("vgpu", "vgpu")


async def test_refuse_does_not_stand_in_the_way_of_what_is_in_force() -> None:
    kubelet = Kubelet()
    kubelet.hold("train", "nvidia.com/gpu", gpu(0).uuid)
    async with switching(gpu(0), kubelet=kubelet, first=Mode.PGPU, when_busy="refuse") as node:
        await node.reach("pgpu")
        await settle(node, Phase.APPLIED)


async def test_a_mode_that_no_gpu_can_be_sold_in_changes_nothing() -> None:
    daemon = Daemon()
    daemon.problem = "nvidia-cuda-mps-control is missing"
    async with switching(gpu(0), first=Mode.PGPU, wings={Mode.MPS: daemon}) as node:
        await node.reach("pgpu")
        node.want(Mode.MPS)
        await settle(node, Phase.BLOCKED)
        assert node.modes() == ["pgpu"]
        assert "nvidia-cuda-mps-control is missing" in node.switcher.state.value.message


class SlowDaemon(Daemon):
    """Tear-downs wait for each other's begin: one after the other they would never end."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self._left = together
        self._all = anyio.Event()

    async def give_back(self, gpu: Gpu) -> None:
        self._left -= 1
        if not self._left:
            self._all.set()
        await self._all.wait()
        await super().give_back(gpu)


async def test_gpus_are_torn_down_side_by_side() -> None:
    daemon = SlowDaemon(3)
    async with switching(gpu(0), gpu(1), gpu(2), first=Mode.MPS, wings={Mode.MPS: daemon}) as node:
        await node.reach("mps", "mps", "mps")
        node.want(Mode.PGPU)
        await node.reach("pgpu", "pgpu", "pgpu")
        assert daemon.up == set()
        never_in_two_modes(node)


async def test_a_change_of_mind_during_a_tear_down_ends_in_the_newest_mode() -> None:
    daemon = SlowDaemon(2)
    async with switching(gpu(0), first=Mode.MPS, wings={Mode.MPS: daemon}) as node:
        await node.reach("mps")
        node.want(Mode.PGPU)
        await anyio.sleep(0.05)
        node.want(Mode.VGPU)
        await anyio.sleep(0.05)
        daemon._all.set()
        await node.reach("vgpu")
        never_in_two_modes(node)


async def test_an_agent_that_stops_sells_nothing_more_and_keeps_its_units_listed() -> None:
    async with switching(gpu(0), gpu(1), first=Mode.PGPU) as node:
        await node.reach("pgpu", "pgpu")
        await node.switcher.close()
        assert node.modes() == ["pgpu-", "pgpu-"]
        assert all(mode.leaving for mode in node.assignment.value.gpus.values())
        node.want(Mode.VGPU)
        await anyio.sleep(0.05)
        assert node.modes() == ["pgpu-", "pgpu-"]


async def test_a_kubelet_that_is_away_does_not_shake_what_is_applied() -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        await settle(node, Phase.APPLIED)
        seen = node.switcher.state.version
        node.kubelet.problem = "PodResources List: no such file"
        node.kubelet.cell.publish(None)
        await anyio.sleep(0.05)
        assert node.switcher.state.version == seen
        node.want(Mode.VGPU)
        await settle(node, Phase.SWITCHING)
        assert "waiting for the kubelet" in node.switcher.state.value.message
        node.kubelet.end("nobody")
        await node.reach("vgpu")


async def test_the_last_request_is_remembered_in_a_file(tmp_path: Path) -> None:
    memory = LastRequest(tmp_path / "state" / "mode")
    assert await memory.read() is None
    accepted: Cell[Desired | None] = Cell(None)
    assignment = Cell(Assignment({gpu(0).uuid: GpuMode(Mode.PGPU)}))
    layout = Desired("mixed", (Entry(("0",), Mode.PGPU, replicas=4), Entry(("rest",), Mode.MPS)))
    async with anyio.create_task_group() as group:
        group.start_soon(memory.follow, accepted, assignment)
        await anyio.lowlevel.checkpoint()
        with anyio.fail_after(5):
            for desired in (PGPU, layout):
                accepted.publish(desired)
                while await memory.read() != desired:
                    await anyio.sleep(0.005)
            # Nobody's: an agent that starts while the API server is away must not offer it.
            accepted.publish(Desired("pgpu-dra", everywhere(Mode.OFF), problem="claimed"))
            while await memory.read() != Desired("none", everywhere(Mode.OFF)):
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()


async def test_instances_that_drain_are_remembered_until_they_have_drained(tmp_path: Path) -> None:
    file, none = tmp_path / "mode", Desired("none", everywhere(Mode.OFF))
    accepted: Cell[Desired | None] = Cell(none)
    assignment = Cell(Assignment({gpu(0).uuid: GpuMode(Mode.MIG, Offering.CLOSED)}))

    async def kept(draining: set[Mode]) -> None:
        with anyio.fail_after(5):
            while True:
                another = LastRequest(file)
                if await another.read() == none and set(another.draining) == draining:
                    return
                await anyio.sleep(0.005)

    for modes, draining in ((assignment.value, {Mode.MIG}), (Assignment(), {Mode.MIG})):
        # The second time the agent has just begun, and has not looked at its GPUs.
        assignment.publish(modes)
        async with anyio.create_task_group() as group:
            group.start_soon(LastRequest(file).follow, accepted, assignment)
            await kept(draining)
            await anyio.sleep(0.05)
            await kept(draining)
            if not modes.gpus:
                assignment.publish(Assignment({gpu(0).uuid: GpuMode(reason="off")}))
                await kept(set())
            group.cancel_scope.cancel()


async def test_what_earlier_agents_and_others_wrote_is_read_for_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mode"
    for text, found in (("vgpu\n", Desired("vgpu")), ("", None), ("{", None), ('{"word": 1}', None)):
        file.write_text(text)
        assert await LastRequest(file).read() == found


def test_a_remembered_request_means_what_it_meant() -> None:
    mixed = (Entry(("rest",), Mode.VGPU),)
    words = ModeCatalog({"mixed": (Entry(("rest",), Mode.PGPU),)}, (Mode.PGPU, Mode.VGPU), "none")
    assert words.remembered(Desired("mixed", mixed)) == Desired("mixed", mixed)
    assert words.remembered(Desired("renamed", mixed)) == Desired("renamed", mixed)
    assert words.remembered(Desired("mps", everywhere(Mode.MPS))) is None  # the configuration turns it off
    assert words.remembered(Desired("mixed")) == Desired("mixed", words.layouts["mixed"])
    assert words.remembered(Desired("renamed")) is None
    assert words.remembered(None) is None


async def test_a_switcher_that_failed_goes_on_where_it_was() -> None:
    daemon = Daemon()
    daemon.gate = anyio.Event()
    async with switching(gpu(0), wings={Mode.MPS: daemon}, run=False) as node:
        async with anyio.create_task_group() as group:
            group.start_soon(node.switcher.run)
            node.want(Mode.MPS)
            with anyio.fail_after(5):
                while not daemon.log:
                    await anyio.sleep(0.005)
            group.cancel_scope.cancel()
        daemon.gate.set()
        async with anyio.create_task_group() as group:
            group.start_soon(node.switcher.run)
            await node.reach("mps")
            group.cancel_scope.cancel()
    assert daemon.log == ["up 0", "up 0"]
