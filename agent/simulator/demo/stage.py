"""The stage of the demo: a machine, a kubelet, a folder, and ways to wait for what was announced."""

import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from agent import settings
from agent.simulator import mps_control
from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec, Timings
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.machine import SimulatedMachine
from agent.simulator.profile import Profile
from agent.simulator.profiles import profile_named

GPU = "nvidia.com/gpu"
LONGEST_FOLDER = 21  # bytes of the path: the sockets of MPS daemons lie deep below it
PROBATION_SECONDS = 1.5  # a real node waits a minute or more


class NotAsTold(Exception):
    """Something that the demo announced did not happen; the text says what."""


@dataclass
class Stage:
    """One simulated node."""

    profile: Profile
    machine: SimulatedMachine
    kubelet: EmbeddedKubelet
    folder: Path
    patience: float  # seconds until something announced counts as not come
    checked: int = 0
    pods: list[PodSpec] = field(default_factory=list)

    def check(self, condition: bool, otherwise: str) -> None:
        """Raises NotAsTold."""
        self.checked += 1
        if not condition:
            raise NotAsTold(otherwise)

    async def wait(self, condition: Callable[[], bool], otherwise: Callable[[], str]) -> float:
        """Wait for something of the node; the seconds it took. Raises NotAsTold."""
        began = anyio.current_time()
        try:
            await self.kubelet.wait_for(condition, self.patience, otherwise)
        except TimeoutError as error:
            raise NotAsTold(str(error)) from error
        self.checked += 1
        return anyio.current_time() - began

    async def offers(self, count: int) -> float:
        """Wait until the node's status offers exactly `count` GPUs; the seconds it took."""
        api = self.kubelet.api
        return await self.wait(
            lambda: api.allocatable.get(GPU) == count,
            lambda: f"the node offers {api.allocatable.get(GPU, 'no')} GPUs, not {count},",
        )

    # Pods

    async def run(self, *pods: PodSpec) -> None:
        """Create pods and wait until all of them run."""
        for spec in pods:
            self.create(spec)
        for spec in pods:
            await self.runs(spec)

    def create(self, spec: PodSpec) -> None:
        """Hand a pod to the API."""
        self.pods.append(spec)
        self.kubelet.create_pod(spec)

    async def runs(self, spec: PodSpec) -> float:
        """Wait until a pod runs; the seconds it took."""
        pod = self.kubelet.pod(spec)
        return await self.wait(
            lambda: pod.phase is Phase.RUNNING,
            lambda: f"pod {spec.name} is {pod.phase} ({pod.message or 'no reason given'})",
        )

    async def delete(self, spec: PodSpec) -> None:
        """Delete a pod and wait until it is gone."""
        self.pods.remove(spec)
        try:
            await self.kubelet.delete_pod(spec, self.patience)
        except TimeoutError as error:
            raise NotAsTold(str(error)) from error

    def nodes_of(self, spec: PodSpec, container: str) -> frozenset[str]:
        """GPU device nodes that a container sees."""
        known = set(self.device_nodes().values())
        return frozenset(known & set(self.kubelet.container(spec, container).device_nodes))

    def device_nodes(self) -> dict[str, str]:
        """Device node by GPU UUID."""
        return {uuid: f"/dev/nvidia{self.machine.gpu(uuid).minor}" for uuid in self.machine.uuids}

    def holders(self) -> Mapping[str, str]:
        """`pod/container` by GPU UUID, from the device nodes that containers see. Raises NotAsTold."""
        found: dict[str, str] = {}
        by_node = {node: uuid for uuid, node in self.device_nodes().items()}
        for spec in self.pods:
            if self.kubelet.pod(spec).phase is not Phase.RUNNING:
                continue
            for container in spec.containers:
                nodes = self.nodes_of(spec, container.name)
                asked = container.limits.get(GPU, 0)
                self.check(len(nodes) == asked, f"{spec.name} sees {sorted(nodes)} but asked for {asked}")
                for node in nodes:
                    uuid = by_node[node]
                    self.check(uuid not in found, f"GPU {uuid} is held by {found.get(uuid)} and {spec.name}")
                    found[uuid] = spec.name if len(spec.containers) == 1 else f"{spec.name}/{container.name}"
        return found

    async def clear(self) -> None:
        """Delete every pod."""
        for pod in list(self.pods):
            await self.delete(pod)

    @asynccontextmanager
    async def api(self) -> AsyncIterator[tuple[HttpApi, dict[str, str]]]:
        """Serve the Kubernetes API, and the keys that give an agent access to it."""
        async with HttpApi(self.kubelet.api).serving() as http:
            kubeconfig = self.folder / "kubeconfig"
            await anyio.to_thread.run_sync(http.write_kubeconfig, kubeconfig)
            yield (
                http,
                {
                    "cluster.access": "required",
                    "cluster.kubeconfig": str(kubeconfig),
                    "cluster.nodeName": self.kubelet.api.node_name,
                },
            )

    async def with_mps(self) -> dict[str, str]:
        """Install a control program that needs no GPU, and the keys that have an agent use it."""
        program = await anyio.to_thread.run_sync(mps_control.install, self.folder / "bin")
        return {
            "host.cdi": str(self.kubelet.root / "cdi"),  # where its container runtime looks
            "host.cgroups": str(self.folder / "cgroups"),
            "mps.controlProgram": str(program),
            "mps.prestartServer": "false",
            "mps.quitSeconds": "0",
        }

    async def with_cdi(self) -> dict[str, str]:
        """Write a CDI specification of the GPUs, and the keys that have an agent use it."""
        folder = self.kubelet.root / "cdi"
        devices = [
            {"name": uuid, "containerEdits": {"deviceNodes": [{"path": node}]}}
            for uuid, node in self.device_nodes().items()
        ]
        text = json.dumps({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices})
        await anyio.to_thread.run_sync(lambda: folder.mkdir(exist_ok=True))
        await anyio.to_thread.run_sync((folder / "nvidia.json").write_text, text)
        return {"host.cdi": str(folder), "injection.strategy": "cdi"}

    def settings(self, more: Mapping[str, str] | None = None) -> settings.Settings:
        """The agent's configuration for this node, with `more` keys. Blocks: call it from a thread."""
        quick = ("needsReset", "needsReboot", "contained", "unknown", "ecc", "lost", "probe")
        flags = {
            "defaultMode": "pgpu",
            "http.address": "127.0.0.1",
            "http.port": "0",
            "kubelet.root": str(self.kubelet.root),
            "cluster.access": "off",
            "driver.root": str(self.folder),
            "host.state": str(self.folder / "state"),
            "host.run": str(self.folder / "run"),
            "host.cdi": str(self.folder / "cdi"),
            "health.kernelLog": "null",
            "health.probeSeconds": "0.2",
            **{f"health.quiet.{kind}": str(PROBATION_SECONDS) for kind in quick},
            **(more or {}),
        }
        return settings.load(None, environment={}, flags=[f"{key}={value}" for key, value in flags.items()])


def gpu_pod(name: str, *gpus: int) -> PodSpec:
    """A pod that asks for whole GPUs, one container for each number."""
    names = ("main",) if len(gpus) == 1 else tuple(f"c{number}" for number in range(len(gpus)))
    return PodSpec(
        name, tuple(ContainerSpec(each, {GPU: count}) for each, count in zip(names, gpus, strict=True))
    )


def _short_folder() -> str:
    """The usual place for temporary files, unless unix sockets below it would get too long a path."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"  # noqa: S108  mkdtemp makes a private one


@asynccontextmanager
async def stage(profile: str, patience: float, status_tick: float) -> AsyncIterator[Stage]:
    """A node on which nothing runs yet; at the end nothing of it is left."""
    shape = profile_named(profile)
    folder = Path(await anyio.mkdtemp(prefix="gna-", dir=_short_folder()))
    try:
        machine = SimulatedMachine.create(shape)
        nodes = {uuid: f"/dev/nvidia{machine.gpu(uuid).minor}" for uuid in machine.uuids}
        kubelet = EmbeddedKubelet(
            folder / "kubelet",
            status_tick=status_tick,
            # Plugins win the race against a starting kubelet's first status on a busy machine, too.
            timings=Timings(registry_poll=0.1, first_status=patience),
            nvidia_nodes=nodes,
        )
        async with kubelet.running():
            yield Stage(shape, machine, kubelet, folder, patience)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(shutil.rmtree, folder)
