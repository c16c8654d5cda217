"""From the agent of 0.1.0 to this one and back, while pods of all modes hold their units."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from agent.model.pod import MPS, VGPU
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.cluster import toolkit
from tests.cluster.agent_process import REPOSITORY
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.earlier_release import COMMIT_0_1_0, agent_of
from tests.cluster.real_rig import RealRig
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, RigError, eventually
from tests.scenarios.mps import MpsNode, node_to_be
from tests.scenarios.rig import GPU

T = TypeVar("T")
LIMIT = 120
"""Seconds for the body of the test (see conftest.py)."""

SLICE = "nvidia.com/gpu.shared"
MIXED = [
    {"gpus": ["0-1"], "mode": "pgpu"},
    {"gpus": ["2-3"], "mode": "vgpu"},
    {"gpus": ["4-5"], "mode": "mps"},
    {"gpus": [6], "mode": "pgpu", "replicas": 4},
]
LAYOUTS = {"mixed": MIXED, "more-mps": [*MIXED, {"gpus": [7], "mode": "mps"}]}
OFFERED: Mapping[str, int] = {GPU: 2, VGPU.core: 200, SLICE: 4}
REQUESTS: Mapping[str, Mapping[str, int]] = {
    "whole": {GPU: 1},
    "fraction": {VGPU.core: 30, VGPU.memory: 16},
    "share": {MPS.core: 30, MPS.memory: 4},
    "slice": {SLICE: 1},
}


class Upgraded:
    """A node in all modes whose agent changes; every pod that it ever took in."""

    def __init__(self, cluster: Cluster, rig: RealRig, node: MpsNode, old: Path, programs: Path) -> None:
        self._cluster = cluster
        self._rig = rig
        self._node = node
        self._trees = {"old": old, "new": REPOSITORY}
        # With it the new agent makes a CDI specification of its own; the old one knows no such key.
        self._more: Mapping[str, Mapping[str, Any]] = {"old": {}, "new": {"injection.toolkit": str(programs)}}
        self._pods: list[PodSpec] = []
        self._mps_gpus = 2
        self._restarted: set[str] = set()

    async def start(self, which: str) -> None:
        """Start one of the two agents, and wait until it offers everything."""
        common = {
            **await self._node.settings(),
            "injection.strategy": "auto",
            "layouts": LAYOUTS,
            "timeSlicing.rename": True,
        }
        # As on a node: by default the agent looks for daemons in all cgroups.
        del common["host.cgroups"]
        self._rig.agent.checkout = self._trees[which]
        await self._rig.start_agent({**common, **self._more[which]})
        await self._offers()

    async def _offers(self) -> None:
        for resource, count in {**OFFERED, MPS.core: 100 * self._mps_gpus}.items():
            await self._rig.wait_allocatable(count, resource)

    async def more_mps(self) -> None:
        """One more GPU in mode mps, whose daemon the agent of now starts."""
        self._mps_gpus += 1
        await _thread(self._node.mode_file.write_text, "more-mps\n")
        await self._offers()

    async def stop(self) -> None:
        """End the agent as an update does."""
        assert await self._rig.stop_agent() == 0
        for resource in (*OFFERED, MPS.core):
            await self._rig.wait_allocatable(0, resource)

    async def becomes(self, which: str) -> None:
        """Update the agent; nothing of pods changes, nor of daemons but those of 0.1.0 without a client."""
        held, running, daemons = await self.held(), await self.containers(), await self.daemons()
        assert len(daemons) == self._mps_gpus
        await self.stop()
        left = (await self.containers(), await self.daemons())
        assert left == (running, daemons), self._rig.agent.log_tail(20_000)
        await self.start(which)
        if which == "new":
            await self._replaced(daemons)
        else:
            assert await self.daemons() == daemons, self._rig.agent.log_tail(20_000)
        assert (await self.held(), await self.containers()) == (held, running)

    async def _replaced(self, before: Mapping[str, int]) -> None:
        """Wait until others serve in the place of all daemons that worked where pods write.

        The agent looks for them every 10 s: a test that is quicker would go on before, or meanwhile.
        """
        with anyio.fail_after(60):
            while True:
                now = await self.daemons()
                if now.keys() == before.keys() and set(now.values()).isdisjoint(before.values()):
                    break
                await anyio.sleep(0.2)
        await self._offers()

    async def take_in(self, when: str) -> None:
        """One more pod of each mode, and one whose container will be started again."""
        pods = [PodSpec(f"{name}-{when}", (ContainerSpec("main", REQUESTS[name]),)) for name in REQUESTS]
        again = [
            PodSpec(f"again-{name}-{when}", (ContainerSpec("main", REQUESTS[name]),), restart_policy="Always")
            for name in ("fraction", "share")
        ]
        for pod in (*pods, *again):
            await self._rig.create_pod(pod)
        for pod in (*pods, *again):
            await _thread(self._cluster.wait_pod, pod.name)
        self._pods += [*pods, *again]

    async def held(self) -> dict[str, frozenset[str]]:
        """The units of each pod; no unit has two holders, and both halves of a share are of one GPU."""
        found: dict[str, frozenset[str]] = {}
        for pod in self._pods:
            units = [await self._rig.held_ids(pod, "main", name) for name in pod.containers[0].limits]
            found[pod.name] = frozenset().union(*units)
            assert len({unit.partition("::")[0] for unit in found[pod.name]}) == 1, (
                pod.name,
                found[pod.name],
            )
            assert len(found[pod.name]) == sum(pod.containers[0].limits.values())
        everything = [unit for units in found.values() for unit in units]
        assert len(everything) == len(set(everything)), "a unit is held twice"
        return found

    async def containers(self) -> dict[str, tuple[str, str, int]]:
        """Phase, container and count of starts of each pod, of those that the test started again no more."""
        found = {}
        for pod in self._pods:
            if pod.name in self._restarted:
                continue
            status = (await _thread(self._cluster.get, "Pod", pod.name))["status"]
            (main,) = status["containerStatuses"]
            found[pod.name] = (status["phase"], main["containerID"], main["restartCount"])
        return found

    async def daemons(self) -> Mapping[str, int]:
        """PIDs of the MPS daemons, by GPU."""
        return await self._node.pids()

    async def start_again(self, when: str) -> None:
        """Have containers that the agent before took in started again, with the CDI names that it gave."""
        for name in (f"again-fraction-{when}", f"again-share-{when}"):
            self._restarted.add(name)
            await _thread(self._kill, name)
            await _thread(partial(eventually, partial(self._again, name), timeout=30, what=f"{name} again"))

    def _kill(self, name: str) -> None:
        with suppress(RigError):  # the container may take the command with it
            self._cluster.exec(name, "main", ["sh", "-c", "kill 1"])

    def _again(self, name: str) -> None:
        (main,) = self._cluster.get("Pod", name)["status"]["containerStatuses"]
        if main["restartCount"] != 1 or "running" not in main["state"]:
            raise NotYet(str(main["state"]))


@asynccontextmanager
async def upgraded(cluster: Cluster, rig: RealRig, folder: Path) -> AsyncIterator[Upgraded]:
    """The node before its first agent."""
    old = await _thread(agent_of, COMMIT_0_1_0, folder)
    await _thread(toolkit.make_driver_root, rig.folder, rig.driver_version, rig.library)
    async with node_to_be(rig) as node:
        await _thread(node.mode_file.write_text, "mixed\n")
        yield Upgraded(cluster, rig, node, old, await _thread(container_toolkit))


async def _thread(call: Callable[..., T], *arguments: Any) -> T:
    return await anyio.to_thread.run_sync(call, *arguments)


async def test_upgrade_from_0_1_0(cluster: Cluster, rig: RealRig, tmp_path: Path) -> None:
    """To the new agent and back; each finds the other's pods, daemons and CDI names."""
    async with upgraded(cluster, rig, tmp_path) as node:
        await node.start("old")
        await node.take_in("before")
        await node.becomes("new")
        await node.start_again("before")
        await node.take_in("new")
        await node.more_mps()
        await node.becomes("old")
        await node.start_again("new")
        assert len(await node.daemons()) == 3
