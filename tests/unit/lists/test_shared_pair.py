"""Lists of the two resources of a pair, and the answers for their containers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent._proto import v1beta1
from agent.cluster.node import NodeInfo
from agent.injection.inject import InjectionChoice, Injector
from agent.inventory.snapshot import GpuState
from agent.kubelet import wire
from agent.kubelet.wire import Allocation, PreferenceRequest, Refused
from agent.lists.shared_pair import Sharing
from agent.model.holding import PairMember
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.pod import VGPU, Stage
from agent.settings import load
from agent.vgpu.wing import VgpuPlugin
from tests.unit.pairing.kubelet_model import KubeletModel, pod, share

CORES, BLOCKS = 100, 40


class Node:
    """A kubelet model with both plugins of vGPU."""

    def __init__(self, gpus: int = 2) -> None:
        self.kubelet = KubeletModel(gpus, BLOCKS)
        self.injector = Injector(load(environment={}))
        self.plugins = {
            member: VgpuPlugin(self.kubelet.shares, member, self.injector, self.kubelet.inventory)
            for member in PairMember
        }

    def listed(self, member: PairMember) -> dict[int, tuple[int, int]]:
        """By index of the GPU: how many units the list has, and how many of them are healthy."""
        plugin = self.plugins[member]
        plugin.refresh()
        found = {state.uuid: [0, 0] for state in self.kubelet.inventory.value.gpus}
        for device in v1beta1.ListAndWatchResponse.parse(plugin.lists.value).devices:
            assert device.topology is None
            found[device.id.partition("::")[0]][0] += 1
            found[device.id.partition("::")[0]][1] += device.health == "Healthy"
        return {
            state.gpu.index: (found[state.uuid][0], found[state.uuid][1])
            for state in self.kubelet.inventory.value.gpus
        }

    def set_mode(self, index: int, mode: GpuMode) -> None:
        modes = dict(self.kubelet.modes.value.gpus)
        modes[self.kubelet.inventory.value.gpus[index].uuid] = mode
        self.kubelet.modes.publish(Assignment(modes))

    def set_health(self, index: int, blocked: str) -> None:
        states = list(self.kubelet.inventory.value.gpus)
        states[index] = replace(states[index], blocked=blocked)
        snapshot = self.kubelet.inventory.value
        by_uuid: dict[str, GpuState] = {state.uuid: state for state in states}
        self.kubelet.inventory.publish(replace(snapshot, gpus=tuple(states), by_uuid=by_uuid))


@given(
    st.lists(st.integers(0, 1200).map("GPU-5fd4f087-86f3-7a43-b711-4771313afc50::m{}".format)), st.booleans()
)
def test_encoded_devices_agree_with_betterproto2(ids: list[str], healthy: bool) -> None:
    message = v1beta1.ListAndWatchResponse(
        devices=[v1beta1.Device(id=each, health="Healthy" if healthy else "Unhealthy") for each in ids]
    )
    assert wire.devices(ids, healthy) == bytes(message)


async def test_everything_is_listed_at_first() -> None:
    node = Node()
    assert node.listed(PairMember.CORE) == dict.fromkeys((0, 1), (CORES, CORES))
    assert node.listed(PairMember.MEMORY) == dict.fromkeys((0, 1), (BLOCKS, BLOCKS))


async def test_a_share_changes_no_list() -> None:
    node = Node()
    versions = [plugin.lists.version for plugin in node.plugins.values()]
    await node.kubelet.admit(pod("a", share("main", 30, 10)))
    node.listed(PairMember.CORE)
    node.listed(PairMember.MEMORY)
    assert [plugin.lists.version for plugin in node.plugins.values()] == versions


async def test_the_memory_of_a_gpu_that_is_held_whole_leaves_the_list() -> None:
    node = Node()
    whole = pod("whole", share("main", 100, 3))
    await node.kubelet.admit(whole)
    assert node.listed(PairMember.MEMORY) == {0: (3, 3), 1: (BLOCKS, BLOCKS)}
    assert node.listed(PairMember.CORE)[0] == (CORES, CORES)
    await node.kubelet.pairing.reconcile()
    assert node.listed(PairMember.MEMORY)[0] == (3, 3)
    node.kubelet.end(whole.key)
    await node.kubelet.pairing.reconcile()
    assert node.listed(PairMember.MEMORY)[0] == (BLOCKS, BLOCKS)


async def test_cores_without_memory_leave_the_list() -> None:
    node = Node()
    await node.kubelet.admit(pod("a", share("main", 30, BLOCKS)))
    assert node.listed(PairMember.CORE) == {0: (30, 30), 1: (CORES, CORES)}
    assert node.listed(PairMember.MEMORY)[0] == (BLOCKS, BLOCKS)


async def test_memory_without_cores_stays() -> None:
    node = Node()
    await node.kubelet.admit(pod("a", share("main", 60, 5), share("b", 40, 5)))
    assert node.listed(PairMember.MEMORY) == dict.fromkeys((0, 1), (BLOCKS, BLOCKS))


async def test_units_of_init_containers_stay_listed() -> None:
    node = Node()
    await node.kubelet.admit(pod("a", share("init", 60, 30, Stage.INIT), share("main", 10, BLOCKS)))
    await node.kubelet.pairing.reconcile()
    # The GPU has no memory left; the kubelet still counts 60 cores as the pod's, though no record shows 50.
    assert node.listed(PairMember.CORE)[0] == (60, 60)


async def test_an_unhealthy_gpu_stays_listed_as_unhealthy() -> None:
    node = Node()
    node.set_health(1, "it has fallen off the bus")
    for member, count in ((PairMember.CORE, CORES), (PairMember.MEMORY, BLOCKS)):
        assert node.listed(member) == {0: (count, count), 1: (count, 0)}


async def test_a_draining_gpu_lists_what_is_held_as_unhealthy() -> None:
    node = Node(1)
    holding = pod("a", share("main", 30, 10))
    await node.kubelet.admit(holding)
    node.set_mode(0, GpuMode(Mode.VGPU, Offering.CLOSED))
    assert (node.listed(PairMember.CORE), node.listed(PairMember.MEMORY)) == ({0: (30, 0)}, {0: (10, 0)})
    node.kubelet.end(holding.key)
    await node.kubelet.pairing.reconcile()
    assert (node.listed(PairMember.CORE), node.listed(PairMember.MEMORY)) == ({0: (0, 0)}, {0: (0, 0)})
    node.set_mode(0, GpuMode(Mode.VGPU))
    assert node.listed(PairMember.CORE) == {0: (CORES, CORES)}


async def test_a_gpu_of_another_mode_lists_nothing() -> None:
    node = Node()
    node.set_mode(0, GpuMode(Mode.PGPU))
    assert node.listed(PairMember.CORE) == {0: (0, 0), 1: (CORES, CORES)}
    new = pod("a", share("main", 30, 10))
    await node.kubelet.admit(new)
    assert node.kubelet.gpus_of(new.key, "main") == {node.kubelet.inventory.value.gpus[1].uuid}


async def test_figures_foretell_an_assignment() -> None:
    node = Node()
    await node.kubelet.admit(pod("a", share("main", 30, 10)))
    uuids = [state.uuid for state in node.kubelet.inventory.value.gpus]
    ahead = Assignment({uuids[0]: GpuMode(Mode.VGPU, Offering.CLOSED), uuids[1]: GpuMode(Mode.VGPU)})
    assert node.plugins[PairMember.CORE].figures(ahead) == (CORES + 30, CORES)
    assert node.plugins[PairMember.MEMORY].figures(ahead) == (BLOCKS + 10, BLOCKS)
    assert node.listed(PairMember.CORE)[0] == (CORES, CORES)


async def test_only_the_part_of_a_changed_gpu_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(8)
    made: list[int] = []
    encoded = wire.devices

    def counting(ids: list[str], healthy: bool) -> bytes:
        made.append(len(ids))
        return encoded(ids, healthy)

    node.set_health(3, "broken")
    monkeypatch.setattr(wire, "devices", counting)
    node.listed(PairMember.MEMORY)
    assert made == [BLOCKS]


@pytest.mark.parametrize("cdi", [False, True])
async def test_both_halves_show_the_same_gpu_and_nothing_else(cdi: bool) -> None:
    node = Node()
    node.injector.choice = InjectionChoice(cdi, "for the test")
    new = pod("a", share("main", 30, 10))
    answers: list[Allocation] = []
    allocate = node.kubelet.pairing.allocate

    async def through_plugin(member: PairMember, ids: list[str]) -> tuple[str, ...]:
        node.kubelet.pairing.allocate = allocate  # type: ignore[method-assign]
        answers.append(await node.plugins[member].allocate(ids))
        node.kubelet.pairing.allocate = through_plugin  # type: ignore[method-assign, assignment]
        return ()

    node.kubelet.pairing.allocate = through_plugin  # type: ignore[method-assign, assignment]
    await node.kubelet.admit(new)
    gpu = node.kubelet.gpus_of(new.key, "main").pop()
    expected = (
        Allocation(cdi_devices=(f"nvidia.com/gpu={gpu}",))
        if cdi
        else Allocation(environment={"NVIDIA_VISIBLE_DEVICES": gpu})
    )
    assert answers == [expected, expected]


async def test_a_mode_adds_conditions_and_answers_of_its_own() -> None:
    node = Node()
    first, second = (state.uuid for state in node.kubelet.inventory.value.gpus)

    class Conditions(Sharing):
        def unready(self, uuid: str) -> str:
            return "the daemon is not serving" if uuid == first else ""

        def full(self, uuid: str) -> str:
            return "60 clients are connected" if uuid == second else ""

    node.kubelet.shares.sharing = Conditions(VGPU, Mode.VGPU)
    assert node.listed(PairMember.CORE) == {0: (CORES, 0), 1: (0, 0)}
    with pytest.raises(Refused):
        await node.kubelet.admit(pod("a", share("main", 30, 10)))


async def test_ids_of_nobody_are_refused() -> None:
    node = Node()
    with pytest.raises(Refused):
        await node.plugins[PairMember.CORE].prefer(PreferenceRequest(("x",), (), 1))
    with pytest.raises(Refused, match="is not known on this node"):
        await node.plugins[PairMember.CORE].allocate(["tencent.com/vcuda-core-17"])
    assert node.injector.software in (None, NodeInfo("", ""))
