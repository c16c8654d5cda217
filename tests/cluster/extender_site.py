"""Three nodes of a cluster whose scheduler asks the extender, each with an agent of its own."""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from agent.model.placement import ASSIGNED
from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from tests.cluster.joined import Joined
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.cluster.rig_node import RigNode
from tests.scenarios.vgpu import CORE, CORES, MEMORY, start

MACHINE, GPUS, BLOCKS = "t4-4", 4, 60  # of each node; blocks of each GPU
NODES = 3
ALL = NODES * GPUS
Place = tuple[str, int]  # node, and index of a GPU


class Site:
    """The nodes of a cluster, each with an agent that is not started yet."""

    def __init__(self, cluster: Cluster, rigs: Mapping[str, RealRig]) -> None:
        self.cluster = cluster
        self.rigs = rigs
        self.one = list(rigs.values())[-1]
        # Events outlive the pods and nodes of the tests before.
        self._earlier = frozenset(each["metadata"]["uid"] for each in self._hints_ignored())

    async def serving(self) -> None:
        """The agents run and all units are to be had on every node."""
        async with anyio.create_task_group() as group:
            for rig in self.rigs.values():
                group.start_soon(self.offered, rig)

    async def offered(self, rig: RealRig) -> None:
        """The agent of one node runs, and all of its units are to be had."""
        await start(rig, extender=True)
        for resource, count in ((CORE, GPUS * CORES), (MEMORY, GPUS * BLOCKS)):
            await rig.wait_allocatable(count, resource, 60)

    async def create(self, *pods: PodSpec) -> None:
        """Create pods; one with a node's name goes there without a scheduler."""
        for each in pods:
            await self.rigs.get(each.node_name or "", self.one).create_pod(each)

    async def running(self, *pods: PodSpec, deadline: float = 60.0) -> None:
        """Wait until they run."""
        for each in pods:
            await self.one.wait_phase(each, Phase.RUNNING, deadline)

    async def place(self, one: PodSpec) -> Place:
        """Where a pod's GPU is, by the kubelet's records."""
        found = await anyio.to_thread.run_sync(partial(self.cluster.get, "Pod", one.name))
        rig = self.rigs[found["spec"]["nodeName"]]
        (uuid,) = {each.partition("::")[0] for each in await rig.held_ids(one, "main", CORE)}
        return found["spec"]["nodeName"], rig.gpu_uuids().index(uuid)

    async def written(self, one: PodSpec) -> dict[str, Any]:
        """The pod's annotations once the agent has confirmed the choice."""
        with anyio.fail_after(20):
            while True:
                found = await anyio.to_thread.run_sync(partial(self.cluster.get, "Pod", one.name))
                annotations: dict[str, Any] = found["metadata"]["annotations"]
                if annotations.get(ASSIGNED) == "true":
                    return annotations
                await anyio.sleep(0.1)

    async def ignored(self) -> Sequence[str]:
        """Events of agents about choices that they did not follow."""
        events = await anyio.to_thread.run_sync(self._hints_ignored)
        return [each["message"] for each in events if each["metadata"]["uid"] not in self._earlier]

    def _hints_ignored(self) -> Sequence[Mapping[str, Any]]:
        return [each for each in self.cluster.find_all("Event") if each["reason"] == "PlacementHintIgnored"]

    async def events(self, one: PodSpec, reason: str) -> dict[str, Any]:
        """The only event of a reason on a pod, once it is there."""

        def found() -> list[dict[str, Any]]:
            uid = self.cluster.get("Pod", one.name)["metadata"]["uid"]
            about = [each for each in self.cluster.find_all("Event") if each["reason"] == reason]
            return [each for each in about if each["involvedObject"].get("uid") == uid]

        with anyio.fail_after(20):
            while not (events := await anyio.to_thread.run_sync(found)):
                await anyio.sleep(0.2)
        (event,) = events
        return event

    async def explained(self, one: PodSpec) -> Sequence[str]:
        """The output of `gpu-node-agent explain` for a pod."""
        program = [sys.executable, "-m", "agent", "explain"]
        command = [*program, one.name, "--kubeconfig", str(self.cluster.kubeconfig)]
        return (await anyio.run_process(command)).stdout.decode().splitlines()

    async def cordon(self, *, closed: bool) -> None:
        """Keep new pods off the nodes, or let them come."""
        patch = {"spec": {"unschedulable": closed or None}}
        for name in self.rigs:
            path = self.cluster.api.path("v1", "Node", None, name)
            await anyio.to_thread.run_sync(partial(self.cluster.api.merge_patch, path, patch))


@contextmanager
def three(cluster: Cluster) -> Iterator[Sequence[RigNode]]:
    """A cluster's own node and two that join it."""
    with ExitStack() as stack:
        joined = [stack.enter_context(Joined(cluster, f"node{number}")) for number in range(2, NODES + 1)]
        yield [cluster, *joined]


@asynccontextmanager
async def sited(cluster: Cluster, nodes: Sequence[RigNode]) -> AsyncIterator[Site]:
    """The nodes with their machines; afterwards they are as before."""
    async with AsyncExitStack() as stack:
        # The last one is cleaned up first, and takes the pods of all nodes with it.
        last = reversed(nodes)
        rigs = {each.node: await stack.enter_async_context(real_rig(each, MACHINE)) for each in last}
        yield await anyio.to_thread.run_sync(Site, cluster, rigs)
