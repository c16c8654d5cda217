"""MPS daemons outlive the agent's pod: the agent as a real privileged pod, deleted and made again.

The pod enters the host's root, as the daemon's launcher does with a driver root, so that it runs this very
checkout. What matters is real: the container's cgroup and mount namespace, and how kubelet and runtime end
it.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import yaml

from agent.mps import launch
from agent.simulator.kubelet.pod_specs import Phase
from tests.cluster import manifests
from tests.cluster.agent_process import REPOSITORY, nested
from tests.cluster.real_rig import RealRig
from tests.cluster.rig import Cluster
from tests.nvml_double.build import STATE_VARIABLE
from tests.scenarios.mps import CORE, held_gpu, mps_pod, node_to_be
from tests.scenarios.skeleton import running

AGENT = "agent-under-test"
CGROUPS = Path("/sys/fs/cgroup")
GRACE_SECONDS = 10


class AgentPod:
    """The agent in a pod of the cluster."""

    def __init__(self, cluster: Cluster, rig: RealRig, config: Path) -> None:
        self._cluster = cluster
        self._rig = rig
        self._config = config

    async def start(self, settings: Mapping[str, Any]) -> None:
        """Create it and wait until its container runs."""
        text = yaml.safe_dump(nested(self._rig._settings() | dict(settings)))
        await anyio.to_thread.run_sync(self._config.write_text, text)
        machine = self._rig._folder / "machine"
        inner = f"cd {REPOSITORY} && exec {sys.executable} -m agent run --config={self._config}"
        container = manifests.container(
            "agent",
            ["chroot", "/host", "/bin/sh", "-c", inner],
            env={STATE_VARIABLE: str(machine), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        container["securityContext"] = {"privileged": True}
        container["volumeMounts"] = [{"name": "host", "mountPath": "/host"}]
        manifest = manifests.pod(
            AGENT,
            container,
            hostPID=True,
            hostNetwork=True,
            nodeName=self._cluster.node,
            terminationGracePeriodSeconds=GRACE_SECONDS,
            volumes=[{"name": "host", "hostPath": {"path": "/"}}],
        )
        await anyio.to_thread.run_sync(self._cluster.apply, manifest)
        await anyio.to_thread.run_sync(partial(self._cluster.wait_pod, AGENT, "Running"))

    async def delete(self, grace_seconds: int = GRACE_SECONDS) -> None:
        """Delete it as an update of its DaemonSet does; return once it is gone."""
        delete = partial(self._cluster.delete, "Pod", AGENT, grace_seconds=grace_seconds, timeout=40)
        await anyio.to_thread.run_sync(delete)

    async def log(self) -> str:
        return await anyio.to_thread.run_sync(partial(self._cluster.logs, AGENT, "agent"))


async def test_daemons_outlive_the_agents_pod(cluster: Cluster, rig: RealRig) -> None:
    total = 100 * len(rig.gpu_uuids())
    async with node_to_be(rig) as node:
        agent = AgentPod(cluster, rig, node.run / "config.yaml")
        settings = await node.settings() | {"host.cgroups": str(CGROUPS)}
        try:
            await agent.start(settings)
            await rig.wait_allocatable(total, CORE, deadline=60)
            pod = mps_pod("long", 50, 8)
            await running(rig, [pod])
            uuid = await held_gpu(rig, pod)
            before = await node.pids()
            assert len(before) == len(rig.gpu_uuids())
            assert await cgroups_of(before[uuid]) == {f"/{launch.CGROUP}"}
            # By request, and as a kill without grace would: neither takes a daemon along.
            for number, grace in enumerate((GRACE_SECONDS, 0)):
                await agent.delete(grace)
                await rig.wait_allocatable(0, CORE)
                assert await node.pids() == before
                assert await rig.phase(pod) is Phase.RUNNING
                await agent.start(settings)
                await rig.wait_allocatable(total, CORE, deadline=60)
                assert await node.pids() == before
                await running(rig, [late := mps_pod(f"late-{number}", 10, 1)])
                assert await held_gpu(rig, late)
                await rig.delete_pod(late)
            # A daemon that an earlier pod started ends on this one's word, once nobody needs it.
            await rig.delete_pod(pod)
            await node.switch_off()
            assert not await left_cgroups()
        except BaseException:
            print(await agent.log())
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await agent.delete(0)


async def cgroups_of(pid: int) -> set[str]:
    """Paths of a process's cgroups, over all hierarchies."""
    lines = (await anyio.Path(f"/proc/{pid}/cgroup").read_text()).splitlines()
    return {line.split(":", 2)[2] for line in lines}


async def left_cgroups() -> list[Path]:
    """The daemons' cgroup, where it still is after a moment though nobody (of another test) is in it."""

    def look() -> list[Path]:
        found = [path for each in launch.hierarchies(CGROUPS) if (path := each / launch.CGROUP).exists()]
        return [path for path in found if not (path / "cgroup.procs").read_text()]

    with anyio.move_on_after(30):
        while await anyio.to_thread.run_sync(look):
            await anyio.sleep(0.1)
    return await anyio.to_thread.run_sync(look)
