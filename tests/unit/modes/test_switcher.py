"""The mode switcher on a node in memory: every step, every change of mind, every failure."""

import math
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.kubelet import service as service_module
from agent.kubelet.podresources import LIST_SECONDS
from agent.kubelet.service import DevicePluginService
from agent.model.holding import Record
from agent.model.modes import Mode
from agent.model.node_inventory import Entry, everywhere
from agent.modes.desired import Desired
from agent.modes.planner import Phase
from agent.modes.switcher import DELIVER_SECONDS, DRAIN_LOOK_SECONDS
from agent.node.conditions import NodeStateWriter
from tests.unit.modes.nodes import Announcements, Daemon, Kubelet, Node, gpu, snapshot_of, switching
from tests.unit.node.test_telling import OwnNode
from tests.virtual_time import in_virtual_time


def never_in_two_modes(node: Node) -> None:
    """No two neighbouring lists offer a GPU in two modes without one between them that offers it in none."""
    for before, after in zip(node.lists.history, node.lists.history[1:], strict=False):
        for uuid, new in after.gpus.items():
            old = before.of(uuid)
            if new.mode is not old.mode and new.mode is not Mode.OFF and old.mode is not Mode.OFF:
                pytest.fail(f"{uuid} went from {old} to {new} in one step")


async def settle(node: Node, phase: Phase) -> None:
    with anyio.fail_after(10):
        await node.switcher.state.wait_for(lambda state: state.phase is phase)


async def test_idle_gpus_flip_at_once() -> None:
    async with switching(gpu(0), gpu(1)) as node:
        node.want(Mode.PGPU)
        await node.reach("pgpu", "pgpu")
        node.want(Mode.VGPU)
        await node.reach("vgpu", "vgpu")
        assert node.lists.enabled == [Mode.PGPU, Mode.VGPU]
        await settle(node, Phase.APPLIED)
        assert node.switcher.state.value.applied == "vgpu"
        never_in_two_modes(node)


async def test_no_mode_registers_nothing() -> None:
    async with switching(gpu(0)) as node:
        await settle(node, Phase.APPLIED)
        assert node.lists.enabled == []
        assert node.modes() == ["off"]


async def test_a_node_without_a_driver_on_which_nothing_is_wanted_has_nothing_to_give_back() -> None:
    async with switching(desired=Desired("none", everywhere(Mode.OFF))) as node:
        node.inventory.publish(Snapshot())
        await settle(node, Phase.SWITCHING)  # NVML has not been asked yet
        node.inventory.publish(Snapshot(problem="NVML cannot be loaded"))
        await settle(node, Phase.APPLIED)
        assert node.switcher.state.value.applied == "none"
        assert NodeStateWriter(OwnNode(), node.switcher.state).nothing_to_give_back
        node.want(Mode.PGPU)
        await settle(node, Phase.SWITCHING)
        assert "NVML cannot be loaded" in node.switcher.state.value.message
        node.inventory.publish(snapshot_of(gpu(0)))
        await node.reach("pgpu")


async def test_a_busy_gpu_drains_while_idle_ones_flip() -> None:
    async with switching(gpu(0), gpu(1), first=Mode.PGPU) as node:
        await node.reach("pgpu", "pgpu")
        node.kubelet.hold("train", "nvidia.com/gpu", gpu(1).uuid)
        node.want(Mode.VGPU)
        await node.reach("vgpu", "pgpu-")
        await settle(node, Phase.SWITCHING)
        state = node.switcher.state.value
        assert state.gpus[1].waiting_for == ("default/train",)
        assert "default/train" in state.message
        node.kubelet.end("train")
        await node.reach("vgpu", "vgpu")
        never_in_two_modes(node)


@pytest.mark.parametrize("device", ["", "::3"])  # the latter from an old list of NVIDIA's plugin
async def test_an_allocation_that_the_kubelet_has_not_recorded_yet_counts_as_a_holder(device: str) -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.lists.granted.add(gpu(0).uuid + device)
        node.want(Mode.VGPU)
        await node.reach("pgpu-")
        await anyio.sleep(DRAIN_LOOK_SECONDS * 1.5)
        assert node.modes() == ["pgpu-"]
        node.lists.granted.clear()
        await node.reach("vgpu")


async def test_a_request_that_is_taken_back_sells_the_draining_gpu_again() -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.kubelet.hold("train", "nvidia.com/gpu", gpu(0).uuid)
        node.want(Mode.VGPU)
        await node.reach("pgpu-")
        node.want(Mode.PGPU)
        await node.reach("pgpu")
        assert Mode.VGPU not in node.lists.enabled


async def test_refuse_leaves_everything_as_it_was() -> None:
    async with switching(gpu(0), gpu(1), first=Mode.PGPU, when_busy="refuse") as node:
        await node.reach("pgpu", "pgpu")
        node.kubelet.hold("train", "nvidia.com/gpu", gpu(1).uuid)
        node.want(Mode.VGPU)
        await settle(node, Phase.BLOCKED)
        assert node.modes() == ["pgpu", "pgpu"]
        assert "default/train" in node.switcher.state.value.message
        node.kubelet.end("train")
        await node.reach("vgpu", "vgpu")


async def test_an_unknown_word_changes_nothing_and_is_told() -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.desired.publish(Desired("foo", problem="label nvidia-device-enable 'foo' is unknown"))
        await settle(node, Phase.BLOCKED)
        assert node.modes() == ["pgpu"]
        assert node.switcher.state.value.applied == "pgpu"
        assert "'foo'" in node.switcher.state.value.message


async def test_a_layout_that_does_not_fit_changes_nothing() -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.want((Entry(("7",), Mode.VGPU),), "odd")
        await settle(node, Phase.BLOCKED)
        assert node.modes() == ["pgpu"]
        assert "index 7" in node.switcher.state.value.message


async def test_modes_side_by_side_and_a_gpu_in_mig_mode_left_out() -> None:
    async with switching(gpu(0), gpu(1), gpu(2, mig=True)) as node:
        node.want((Entry(("0",), Mode.PGPU, replicas=4), Entry(("rest",), Mode.VGPU)), "mixed")
        await node.reach("pgpu", "vgpu", "off")
        assert node.assignment.value.of(gpu(0).uuid).replicas == 4
        assert "MIG" in node.assignment.value.of(gpu(2).uuid).reason


async def test_a_mode_is_sold_only_once_it_is_set_up_and_torn_down_before_the_next() -> None:
    daemon = Daemon()
    daemon.gate = anyio.Event()
    async with switching(gpu(0), wings={Mode.MPS: daemon}) as node:
        node.want(Mode.MPS)
        while not daemon.log:
            await anyio.sleep(0.005)
        assert node.modes() == ["off"]
        daemon.gate.set()
        await node.reach("mps")
        node.want(Mode.PGPU)
        await node.reach("pgpu")
        assert daemon.log == ["up 0", "down 0"]
        never_in_two_modes(node)


async def test_a_failed_set_up_goes_back_and_is_tried_again() -> None:
    daemon = Daemon()
    daemon.fail = "nvidia-cuda-mps-control did not start; see control.log"
    async with switching(gpu(0), first=Mode.PGPU, wings={Mode.MPS: daemon}) as node:
        await node.reach("pgpu")
        node.want(Mode.MPS)
        await settle(node, Phase.FAILED)
        await node.reach("pgpu")
        assert node.switcher.state.value.message == daemon.fail
        daemon.fail = None
        await node.reach("mps")
        await settle(node, Phase.APPLIED)


async def test_a_change_of_mind_during_a_set_up_ends_in_the_newest_mode() -> None:
    daemon = Daemon()
    daemon.gate = anyio.Event()
    async with switching(gpu(0), wings={Mode.MPS: daemon}) as node:
        node.want(Mode.MPS)
        while not daemon.log:
            await anyio.sleep(0.005)
        node.want(Mode.VGPU)
        await anyio.sleep(0.05)
        daemon.gate.set()
        await node.reach("vgpu")
        await settle(node, Phase.APPLIED)
        # The daemon that nobody wants any more is not left behind.
        assert daemon.up == set()


async def test_after_a_restart_holders_tell_the_mode_of_their_gpu() -> None:
    kubelet = Kubelet()
    kubelet.hold("old", "tencent.com/vcuda-core", f"{gpu(0).uuid}::c17")
    async with switching(gpu(0), gpu(1), kubelet=kubelet, first=Mode.PGPU) as node:
        await node.reach("vgpu-", "pgpu")
        kubelet.end("old")
        await node.reach("pgpu", "pgpu")


async def test_after_a_restart_replicas_in_use_stay_replicas() -> None:
    kubelet = Kubelet()
    kubelet.hold("old", "nvidia.com/gpu", f"{gpu(0).uuid}::r2")
    async with switching(gpu(0), kubelet=kubelet) as node:
        node.want((Entry(("rest",), Mode.PGPU, replicas=4),), "sliced")
        await node.reach("pgpu")
        assert node.assignment.value.of(gpu(0).uuid).replicas == 4


async def test_nothing_is_sold_before_the_kubelet_tells_who_holds_what() -> None:
    kubelet = Kubelet()
    kubelet.cell.publish(None)
    kubelet.problem = "PodResources List: no such file"
    async with switching(gpu(0), kubelet=kubelet, first=Mode.PGPU) as node:
        await settle(node, Phase.SWITCHING)
        await anyio.sleep(0.05)
        assert node.modes() == ["off"]
        kubelet.end("nobody")
        await node.reach("pgpu")


async def test_a_shrink_is_announced_before_the_list_and_settled_after_it() -> None:
    async with switching(gpu(0), first=Mode.PGPU, announce=True) as node:
        await node.reach("pgpu")
        before = len(node.lists.history)
        node.want(Mode.VGPU)
        await node.reach("vgpu")
        announcer = node.switcher._announcer
        assert isinstance(announcer, Announcements)
        assert announcer.log == [f"shrink after {before} lists", f"settled after {before + 1} lists"]


async def test_a_gpu_that_is_added_joins_the_mode() -> None:
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        node.inventory.publish(snapshot_of(gpu(0), gpu(1)))
        await node.reach("pgpu", "pgpu")


async def test_a_storm_of_requests_ends_in_the_last_one() -> None:
    async with switching(gpu(0), gpu(1), first=Mode.PGPU) as node:
        for number in range(1000):
            node.want((Mode.PGPU, Mode.VGPU, Mode.MPS)[number % 3])
            if number % 50 == 0:
                await anyio.lowlevel.checkpoint()
        node.want(Mode.VGPU)
        await node.reach("vgpu", "vgpu")
        await settle(node, Phase.APPLIED)
        never_in_two_modes(node)


@in_virtual_time
async def test_a_mode_is_offered_once_the_list_of_the_old_one_has_left() -> None:
    """An ID that still stands on an open list must not stand on another: the kubelet may be slow to read."""
    async with switching(gpu(0), first=Mode.PGPU) as node:
        await node.reach("pgpu")
        left = anyio.Event()
        node.lists.delivered = left.wait  # type: ignore[method-assign]
        node.want(Mode.VGPU)
        await anyio.sleep(DELIVER_SECONDS - 0.5)
        assert node.modes() == ["pgpu-"]
        await anyio.sleep(1.0)  # it is not waited for without end before the GPU closes,
        assert node.modes() == ["off"]  # nor before the next one is offered
        offered = anyio.current_time() + DELIVER_SECONDS - 1.0
        await anyio.sleep(0.5)
        left.set()
        await node.reach("vgpu")
        assert anyio.current_time() < offered
        never_in_two_modes(node)


@in_virtual_time
async def test_foreign_ids_keep_their_gpu(logs: Any) -> None:
    """Pods got their GPU from NVIDIA's plugin, which calls its replicas GPU-...::3."""
    kubelet = Kubelet()
    first, other = gpu(0), gpu(1)
    kubelet.hold("theirs", "nvidia.com/gpu", f"{first.uuid}::3")
    async with switching(first, other, kubelet=kubelet, first=Mode.PGPU) as node:
        await node.reach("off", "pgpu")
        await settle(node, Phase.APPLIED)
        state = node.switcher.state.value
        assert f"default/theirs holds it as {first.uuid}::3 of nvidia.com/gpu" in state.message
        assert "1 GPU(s) pgpu" in state.message
        assert "another device plugin" in state.gpus[0].active.reason
        node.want(Mode.VGPU)
        await node.reach("off", "vgpu")
        kubelet.end("theirs")
        await node.reach("vgpu", "vgpu")
        # One that comes while the GPU is on offer takes it off the lists, and those that hold it stay listed.
        kubelet.hold("ours", "tencent.com/vcuda-core", f"{other.uuid}::c0")
        kubelet.hold("theirs", "nvidia.com/gpu.shared", "1")
        await node.reach("vgpu", "vgpu-")
        kubelet.end("ours")
        await node.reach("vgpu", "off")
        kubelet.end("theirs")
        await node.reach("vgpu", "vgpu")
        never_in_two_modes(node)
    told = [
        (each["event"], each["gpu"]) for each in logs if each["event"] in ("gpu_withheld", "gpu_let_back")
    ]
    back_and_forth = ("gpu_withheld", "gpu_let_back")
    assert told == [(event, each.uuid) for each in (first, other) for event in back_and_forth]


@in_virtual_time
async def test_slow_reading_keeps_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is handed out just after a reading began, which does not show it however long it takes."""
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=anyio.current_time))
    one = gpu(0)

    class Slow(Kubelet):
        """Answers what it knew when it was asked."""

        slow, began = 0.0, -math.inf

        async def refresh(self) -> Record | None:
            known, began = self.cell.value, anyio.current_time()
            if self.slow:
                seconds, self.slow = self.slow, 0.0
                await anyio.sleep(0.01)
                service._touch([[one.uuid]])
                self.hold("late", "nvidia.com/gpu", one.uuid)
                await anyio.sleep(seconds)
            self.began = began
            await super().refresh()
            return known

    kubelet = Slow()
    service = DevicePluginService(
        SimpleNamespace(resource="r", lists=Cell(b"")),
        read=lambda: Record(began=kubelet.began, written=kubelet.began),
    )
    for seconds in (LIST_SECONDS, 60.0):
        async with switching(one, kubelet=kubelet, first=Mode.PGPU) as node:
            node.lists.granted_lately = service.granted_lately  # type: ignore[method-assign]
            await node.reach("pgpu")
            kubelet.slow = seconds
            node.want(Mode.VGPU)
            await anyio.sleep(seconds + 5)
            assert node.modes() == ["pgpu-"]
            kubelet.end("late")
            await node.reach("vgpu")
        assert service.granted_lately() == frozenset()
        assert not service._granted


@in_virtual_time
async def test_nothing_is_concluded_of_a_withheld_gpu_before_its_list_has_left() -> None:
    """The kubelet may be choosing it by the list that it has."""
    kubelet, one = Kubelet(), gpu(0)
    async with switching(one, kubelet=kubelet, first=Mode.PGPU) as node:
        await node.reach("pgpu")
        left = anyio.Event()
        node.lists.delivered = left.wait  # type: ignore[method-assign]
        kubelet.hold("theirs", "nvidia.com/gpu", f"{one.uuid}::3")
        await anyio.sleep(DELIVER_SECONDS - 0.5)
        assert node.assignment.value.of(one.uuid).leaving
        left.set()
        await anyio.sleep(0.5)
        assert not node.assignment.value.of(one.uuid).leaving


@in_virtual_time
async def test_a_reading_from_before_the_stop_concludes_nothing() -> None:
    """The stop closes GPUs, and they stay listed: the kubelet may be about to ask for one."""

    class Slow(Kubelet):
        seconds = 0.0

        async def refresh(self) -> Record | None:
            await anyio.sleep(self.seconds)
            return await super().refresh()

    kubelet, one, other = Slow(), gpu(0), gpu(1)
    kubelet.hold("p", "nvidia.com/gpu", one.uuid)
    async with switching(one, other, kubelet=kubelet, first=Mode.PGPU) as node:
        await node.reach("pgpu", "pgpu")
        kubelet.seconds = 1.0
        node.want((Entry(("0",), Mode.VGPU), Entry(("1",), Mode.PGPU)))
        await node.reach("pgpu-", "pgpu")
        await anyio.sleep(0.5)
        before = len(node.lists.history)
        await node.switcher.close()
        await anyio.sleep(5)
        assert all(each.of(other.uuid).leaving for each in node.lists.history[before:])


@in_virtual_time
async def test_what_is_withheld_while_the_scheduler_is_told_is_not_offered_in_its_new_mode() -> None:
    """The target that was computed before would say otherwise."""
    one, strangers = gpu(0), Cell[dict[str, str]]({})
    unexplained = SimpleNamespace(withheld=strangers)
    async with switching(one, first=Mode.PGPU, unexplained=unexplained, announce=True) as node:
        await node.reach("pgpu")
        announcer = node.switcher._announcer
        assert isinstance(announcer, Announcements)
        served = announcer.served = anyio.Event()
        node.want(Mode.VGPU)
        await anyio.sleep(0.5)
        strangers.publish({one.uuid: "process 7"})
        await node.reach("pgpu-")
        before = len(node.lists.history)
        served.set()
        await anyio.sleep(5)
        assert node.modes() == ["off"]
        assert Mode.VGPU not in {each.of(one.uuid).mode for each in node.lists.history[before:]}


@in_virtual_time
async def test_what_is_withheld_while_the_kubelet_is_asked_is_concluded_about_after_its_list() -> None:
    one, other, strangers = gpu(0), gpu(1), Cell[dict[str, str]]({})

    class Away(Kubelet):
        away = False

        async def refresh(self) -> Record | None:
            if not self.away:
                return await super().refresh()
            self.away = False
            strangers.publish({one.uuid: "process 7"})
            await anyio.sleep(0.1)
            return None

    kubelet = Away()
    kubelet.hold("p", "nvidia.com/gpu", other.uuid)
    unexplained = SimpleNamespace(withheld=strangers)
    async with switching(one, other, kubelet=kubelet, first=Mode.PGPU, unexplained=unexplained) as node:
        await node.reach("pgpu", "pgpu")
        node.want((Entry(("0",), Mode.PGPU), Entry(("1",), Mode.VGPU)))  # one drains: the kubelet is asked
        await node.reach("pgpu", "pgpu-")
        left = anyio.Event()
        node.lists.delivered = left.wait  # type: ignore[method-assign]
        kubelet.away = True
        await node.reach("pgpu-", "pgpu-")
        await anyio.sleep(DELIVER_SECONDS - 0.5)
        assert node.assignment.value.of(one.uuid).leaving
        left.set()
        await node.reach("off", "pgpu-")
