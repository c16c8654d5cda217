"""Pods whose GPU memory is capped: CUDA programs in containers, on a node whose driver is the CUDA double."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from agent.vgpu import layout
from agent.web.control import AgentUnreachable, ask
from clib.build_library import cached
from tests.cluster import manifests, toolkit
from tests.cluster.api import Object
from tests.cluster.build.cache import cache_root
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.build.python_image import PYTHON, PYTHON_IMAGE
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.cluster.running import process_in
from tests.cluster.waiting import NotYet, eventually
from tests.cuda_double import build as cuda_build
from tests.cuda_double.layout import STATE_BESIDE_LIBRARY
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import Program, commanded
from tests.nvml_double.build import STATE_VARIABLE
from tests.pace import scaled
from tests.scenarios.vgpu import CORE, CORES, MEMORY

T = TypeVar("T")
PROFILE = "l40s-2"
BLOCK = 256 * MIB
CONTEXT = 300 * MIB  # of a process, by the double
DRIVER = f"/{toolkit.LIBRARIES}/libcuda.so.1"
CLIENT = "/client.py"
WAIT_SECONDS = 30.0


class CappedPods:
    """The node, and the pods that a test made on it."""

    def __init__(self, cluster: Cluster, rig: RealRig) -> None:
        self.cluster = cluster
        self.rig = rig
        gpus = [CudaGpu(uuid=uuid, total=rig.machine.gpu(uuid).memory_total) for uuid in rig.gpu_uuids()]
        self.machine = CudaMachine.create(rig.folder / "cuda-state", gpus)
        self.library = cached()
        driver = cuda_build.build(cache_root() / "cuda")
        toolkit.make_driver_root(rig.folder, rig.driver_version, rig.library, driver)
        (cluster.cdi_dir / "nvidia.json").unlink()
        self._pods: list[str] = []

    @property
    def variables(self) -> dict[str, str]:
        """By which the doubles find their state, where the environment is not emptied."""
        return {**self.machine.environment, STATE_VARIABLE: str(self.rig.folder / "machine")}

    async def start(self, **settings: object) -> None:
        """Start the agent; return when it offers all GPUs as vGPUs."""
        given = {
            "defaultMode": "vgpu",
            "injection.strategy": "auto",
            "injection.toolkit": str(await thread(container_toolkit)),
            "vgpu.enforcement": "library",
            "vgpu.library": str(self.library),
            **await self.rig.api_access(),
            **settings,
        }
        await self.rig.start_agent(given)
        await thread(partial(eventually, self._status, timeout=WAIT_SECONDS, what="the agent answers"))
        count = CORES * len(self.rig.gpu_uuids())

        async def offered() -> bool:
            return await self.rig.known_devices(CORE) == count

        await until(offered, "the kubelet knows all units")
        await self.rig.wait_allocatable(count, CORE, WAIT_SECONDS)

    async def run(
        self, name: str, *caps: int, user: int = 0, restart: str = "Never", cores: int = 10
    ) -> None:
        """A pod with a container (`c0`, `c1`, ...) for each cap in blocks, all of them running."""
        containers = [self._container(f"c{number}", cap, cores) for number, cap in enumerate(caps)]
        files = {
            "state": self.machine.path,
            "client": Path(cuda_build.__file__).with_name("client.py"),
            "machine": self._nvml_state,
        }
        volumes = [{"name": key, "hostPath": {"path": str(path)}} for key, path in files.items()]
        security = {"runAsUser": user}
        made = manifests.pod(
            name, *containers, restart_policy=restart, volumes=volumes, securityContext=security
        )
        self._pods.append(name)
        await thread(self.cluster.apply, made)
        await thread(self.cluster.wait_pod, name)

    @property
    def _nvml_state(self) -> Path:
        return self.rig.folder / "machine"

    def _container(self, name: str, blocks: int, cores: int) -> dict[str, Any]:
        made = manifests.container(name, limits={CORE: cores, MEMORY: blocks}, env=self.variables)
        beside_the_driver = f"/{toolkit.LIBRARIES}/{STATE_BESIDE_LIBRARY}"
        mounts = [
            ("state", beside_the_driver),
            ("state", str(self.machine.path)),
            ("client", CLIENT),
            ("machine", str(self._nvml_state)),
        ]
        return {
            **made,
            "image": PYTHON_IMAGE,
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in mounts],
        }

    async def learn_contexts(self, name: str) -> None:
        """Have the agent measure what a context costs: until then a table says more than the double takes."""
        gpu = await self.gpu_of(name)

        def learned() -> None:
            with self.program(name) as program:
                program(f"init({gpu})")
                eventually(told, timeout=WAIT_SECONDS, what="what a context costs is known")
            eventually(told, timeout=WAIT_SECONDS, what="the program that ended counts no more")

        def told() -> None:
            limits = layout.read_limits(file.read_bytes())[0]
            if (limits.context_bytes, limits.unseen_bytes) != (CONTEXT, 0):
                raise NotYet(str(limits))

        file = Path((await self.mounts(name))["/usr/lib/gpu-node-agent/limits"][0])
        await thread(learned)

    async def delete(self, name: str) -> None:
        """End a pod; return once it is gone."""
        await thread(partial(self.cluster.delete, "Pod", name, grace_seconds=1))

    async def end(self) -> None:
        """End all pods."""
        for name in self._pods:
            await self.delete(name)

    async def gpu_of(self, name: str) -> int:
        """CUDA's number of the GPU that a pod has."""
        nodes = await self.sh(name, "find /dev -name 'nvidia[0-9]*'")
        (number,) = [
            number
            for number, uuid in enumerate(self.rig.gpu_uuids())
            if self.rig.device_node(uuid) == nodes.strip()
        ]
        return number

    async def sh(self, name: str, script: str, container: str = "c0") -> str:
        """The output of a command in a container."""
        return await thread(self.cluster.exec, name, container, ["sh", "-c", script])

    @contextmanager
    def program(self, name: str, container: str = "c0", way: Sequence[str] = ()) -> Iterator[Program]:
        """A CUDA program in a container, started in some way, and ended afterwards. Blocks."""
        kubectl = [str(self.cluster.parts.program("kubectl")), f"--kubeconfig={self.cluster.kubeconfig}"]
        inside = [*way, PYTHON, "-I", "-S", CLIENT, DRIVER]
        argv = [*kubectl, "exec", "-i", name, f"--container={container}", "--", *inside]
        with commanded(argv, leave_seconds=WAIT_SECONDS) as program:
            yield program

    async def ask_cuda(
        self, name: str, *commands: str, container: str = "c0", way: Sequence[str] = ()
    ) -> Any:
        """The output of the last command of a CUDA program in a container."""

        def asked() -> Any:
            with self.program(name, container, way) as program:
                return program(*commands)

        return await thread(asked)

    async def pod(self, name: str) -> Object:
        return await thread(self.cluster.get, "Pod", name)

    async def limits_told(self, name: str) -> Mapping[str, Any]:
        """The annotation of a pod that says which fences hold."""
        text = (await self.pod(name))["metadata"].get("annotations", {}).get("gpu-node-agent.io/limits")
        return dict(json.loads(text)) if text else {}

    async def events(self, name: str) -> set[str]:
        """Reasons of the agent's events about a pod's limits."""
        found = await thread(self.cluster.events, name)
        reasons = {each.partition(":")[0] for each in found}
        return {each for each in reasons if each.startswith(("Limits", "Resize", "Memory"))}

    async def status_of(self, name: str, container: str = "c0") -> Mapping[str, Any]:
        """The limits of a container in `status`."""
        answer = await thread(self._status)
        (found,) = [
            holder["limits"]
            for gpu in answer["gpus"]
            for holder in gpu["holders"]
            if (holder["pod"], holder["container"]) == (f"default/{name}", container)
            and MEMORY in holder["units"]
        ]
        return dict(found)

    def _status(self) -> Any:
        try:
            return ask(self.rig.run_folder / "agent.sock", "status")
        except AgentUnreachable as error:
            raise NotYet(str(error)) from error

    async def mounts(self, name: str, container: str = "c0") -> dict[str, tuple[str, str]]:
        """The agent's mounts in a container by path: (file on the host, options of the mount)."""
        pid = await self.process(name, container)
        text = await anyio.Path(f"/proc/{pid}/mountinfo").read_text()
        # proc(5): id, parent, device, root of the mount, mount point, options, ...
        lines = [line.split() for line in text.splitlines()]
        ours = ("/usr/lib/gpu-node-agent/", "/etc/ld.so.preload")
        return {line[4]: (line[3], line[5]) for line in lines if line[4].startswith(ours)}

    async def process(self, name: str, container: str = "c0") -> int:
        """A container's first process, as the host sees it."""
        status = (await self.pod(name))["status"]
        named = {each["name"]: each["containerID"] for each in status["containerStatuses"]}
        return await thread(process_in, named[container].rpartition("/")[2])


@asynccontextmanager
async def capped_pods(cluster: Cluster, setenv: Callable[[str, str], None]) -> AsyncIterator[CappedPods]:
    """A node without pods, whose driver is the CUDA double; `setenv` for what this process starts."""
    async with real_rig(cluster, PROFILE) as rig:
        made = await thread(CappedPods, cluster, rig)
        for name, value in made.machine.environment.items():
            setenv(name, value)  # the agent's NVML shows the same processes
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.end()


async def thread(call: Callable[..., T], *arguments: Any) -> T:
    """A call that blocks."""
    return await anyio.to_thread.run_sync(call, *arguments)


async def until(condition: Callable[[], Any], what: str, deadline: float = WAIT_SECONDS) -> None:
    """Wait for something that a coroutine finds out."""
    with anyio.move_on_after(scaled(deadline)):
        while not await condition():
            await anyio.sleep(0.05)
        return
    raise TimeoutError(f"{what}: not after {deadline:g} s")
