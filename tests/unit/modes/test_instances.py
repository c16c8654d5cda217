"""Pods with instances of GPUs in MIG mode: this agent's are taken over, those of another plugin left."""

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Record
from agent.model.modes import Mode
from agent.model.node_inventory import everywhere
from agent.modes.desired import Desired
from agent.modes.planner import Phase
from agent.modes.withholding import Cordon
from tests.unit.modes.nodes import Kubelet, gpu, switching
from tests.unit.modes.test_switcher import settle

SMALL = "nvidia.com/mig-1g.18gb"
MIG = Desired("mig", everywhere(Mode.MIG))
NONE = Desired("none", everywhere(Mode.OFF))
PGPU = Desired("pgpu", everywhere(Mode.PGPU))
UNKNOWN = Desired("foo", problem="label nvidia-device-enable 'foo' is unknown")


def one_pod(resource: str = SMALL) -> Kubelet:
    """A pod holds an instance of GPU 0."""
    kubelet = Kubelet()
    kubelet.parents = {"MIG-0-1": gpu(0).uuid}
    kubelet.hold("worker", resource, "MIG-0-1")
    return kubelet


@pytest.mark.parametrize("resource", [SMALL, "nvidia.com/gpu"])
@pytest.mark.parametrize("standing", [None, NONE, PGPU])
async def test_instances_of_another_plugin_are_left_to_it_without_a_request(
    standing: Desired | None, resource: str
) -> None:
    """The kubelet would take them from NVIDIA's plugin, whose names they have, for good."""
    async with switching(
        gpu(0, mig=True), kubelet=one_pod(resource), desired=NONE, standing=standing
    ) as node:
        await settle(node, Phase.APPLIED)
        assert (node.lists.enabled, node.modes()) == ([], ["off"])
        assert node.switcher.state.value.gpus[0].waiting_for == ()


async def test_instances_of_another_plugin_are_left_to_it_beside_whole_gpus() -> None:
    async with switching(gpu(0, mig=True), gpu(1), kubelet=one_pod(), desired=PGPU) as node:
        await node.reach("off", "pgpu")
        await settle(node, Phase.APPLIED)
        assert node.lists.enabled == [Mode.PGPU]
        # Nor are they waited for when the mode changes.
        node.want(Mode.OFF)
        await node.reach("off", "off")
        await settle(node, Phase.APPLIED)
        assert node.lists.enabled == [Mode.PGPU]


@pytest.mark.parametrize(("desired", "standing"), [(MIG, None), (MIG, MIG), (UNKNOWN, MIG)])
async def test_instances_that_pods_hold_are_taken_over_by_an_agent_of_the_mode(
    desired: Desired, standing: Desired | None
) -> None:
    async with switching(gpu(0, mig=True), kubelet=one_pod(), desired=desired, standing=standing) as node:
        await node.reach("mig")
        assert node.lists.enabled == [Mode.MIG]
        # From the first list on: an ID that is held never leaves it.
        assert node.lists.history
        assert all(each.of(gpu(0).uuid).mode is Mode.MIG for each in node.lists.history)


async def test_instances_drain_that_an_agent_before_had_handed_out() -> None:
    """The request changed while it was away; what is remembered says whose they are."""
    kubelet = one_pod()
    async with switching(gpu(0, mig=True), kubelet=kubelet, desired=NONE, standing=MIG) as node:
        await node.reach("mig-")
        await settle(node, Phase.SWITCHING)
        assert node.switcher.state.value.gpus[0].waiting_for == ("default/worker",)
        kubelet.end("worker")
        await node.reach("off")
        await settle(node, Phase.APPLIED)


async def test_instances_that_drained_before_a_restart_go_on_draining() -> None:
    """The request that is remembered is the one for none already."""
    kubelet = one_pod()
    async with switching(
        gpu(0, mig=True), kubelet=kubelet, desired=NONE, standing=NONE, draining=(Mode.MIG,)
    ) as node:
        await node.reach("mig-")
        await settle(node, Phase.SWITCHING)
        assert node.switcher.state.value.gpus[0].waiting_for == ("default/worker",)
        kubelet.end("worker")
        await node.reach("off")
        # From now on they are another plugin's.
        kubelet.hold("theirs", SMALL, "MIG-0-1")
        node.want(Mode.PGPU)
        await settle(node, Phase.BLOCKED)
        assert not any(each.waiting_for for each in node.switcher.state.value.gpus)


async def test_held_instances_of_a_cordoned_gpu_are_taken_over() -> None:
    """Its target is off, its request is not."""
    cordons = Cell({gpu(0).uuid: Cordon("by hand")})
    async with switching(
        gpu(0, mig=True), kubelet=one_pod(), desired=MIG, standing=MIG, cordons=cordons
    ) as node:
        await node.reach("mig-")


async def test_an_instance_that_is_gone_keeps_its_gpu_while_it_is_being_handed_out() -> None:
    """Somebody has destroyed it meanwhile: the inventory does not know its GPU any more."""
    kubelet = Kubelet()
    kubelet.cell.publish(Record((), (), parents={"MIG-0-1": gpu(0).uuid}))
    async with switching(gpu(0, mig=True), kubelet=kubelet, desired=MIG, standing=MIG) as node:
        await node.reach("mig")
        node.lists.granted = {"MIG-0-1"}
        node.want(Mode.OFF)
        await node.reach("mig-")
        reads = kubelet.reads
        while kubelet.reads < reads + 2:
            await anyio.sleep(0.01)
        assert node.assignment.value.of(gpu(0).uuid).leaving
        node.lists.granted = set()
        await node.reach("off")
