"""The world of a storm: GPUs, a kubelet, an API server, MPS daemons and one node agent in this process."""

import contextvars
import json
import math
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from agent.app.agent import Agent
from agent.mig.made import NAME as INSTANCES
from agent.model.resource_claim import DRIVER, WORDS
from agent.modes.desired import LABEL
from agent.node.capacity import TAINT
from agent.settings import (
    ClusterSettings,
    Dra,
    HealthSettings,
    HostSettings,
    HttpSettings,
    Kubelet,
    LayoutEntry,
    Mig,
    Modes,
    Mps,
    Sampling,
    Settings,
    Vgpu,
)
from agent.simulator.kubelet import EmbeddedKubelet
from agent.simulator.kubelet.embedded import Face
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.kubelet.pod_specs import PodSpec
from agent.simulator.kubelet.resource_objects import CLASSES
from agent.simulator.machine import SimulatedMachine
from agent.simulator.profile import places
from agent.simulator.profiles import profile_named
from agent.vgpu.library import ELF
from tests.storm import cheaper, direct_http, mps_daemons, ordering, seams
from tests.storm.cheaper import NvmlFaults
from tests.storm.clock import CLOCK
from tests.storm.extenders import Replicas
from tests.storm.lives import AgentRun
from tests.storm.lost_devices import LostDevices
from tests.storm.mps_daemons import DaemonTable
from tests.storm.neighbours import Neighbour
from tests.storm.parts import PROBE_SECONDS, Parts

# Few units, so that lists are short: what storms look for does not depend on their number. Two GPUs, and one
# that may be plugged in.
_L40S = profile_named("l40s-2")
PROFILE = replace(
    _L40S, model=replace(_L40S.model, memory_mib=12 << 10), places=places("41 81 c1", (0, "0-95,192-287"))
)
SPARE = 2
PARTED = 1  # slot of the GPU in MIG mode, where there is one
WITH_MIG = replace(PROFILE, model=replace(PROFILE.model, mig_capable=True))
PARTS: dict[str, tuple[str, ...]] = {
    "parts": ("3g.6gb", "1g.2gb", "1g.2gb"),
    "halves": ("3g.6gb", "2g.3gb", "1g.3gb"),
    "as-they-are": (),
}
DOORS = {
    "doors": [LayoutEntry(gpus=["0"], mode="dra"), LayoutEntry(gpus=["rest"], mode="vgpu")],
    "others": [LayoutEntry(gpus=["0"], mode="pgpu"), LayoutEntry(gpus=["rest"], mode="dra")],
}
LIBRARY = "library.so"
API_SOCKET = "api.sock"
AGENT_CGROUP = f"0::/kubepods/pod{UUID(int=1)}/{'a' * 64}"


@dataclass(frozen=True)
class Shape:
    """Optional parts of a world."""

    mps: bool = False
    resize: bool = False  # limits of vGPU containers are followed, and may be changed while they run
    extender: bool = False  # kube-scheduler asks one, of which there are two replicas
    mig: bool = False  # a GPU is in MIG mode, and layouts name its instances
    claims: bool = False  # GPUs may be devices of DRA

    @classmethod
    def of(cls, rng: random.Random, seed: int) -> "Shape":
        """A shape that the seed chose."""
        # By a draw of its own: storms without an extender are what they were before there was one.
        extender = random.Random(f"extender of {seed}").random() < 0.3
        mig = random.Random(f"parts for {seed}").random() < 0.12
        claims = random.Random(f"DRA for {seed}").random() < 0.12
        return cls(
            mps=rng.random() < 0.3, resize=rng.random() < 0.3, extender=extender, mig=mig, claims=claims
        )


class World:
    """Made by `world`."""

    def __init__(
        self, folder: Path, machine: SimulatedMachine, group: TaskGroup, seed: int, shape: Shape
    ) -> None:
        self.folder = folder
        self.machine = machine
        self.group = group
        self.shape = shape
        self.spare = SPARE
        face: Face = "1.37" if shape.claims else "1.36"
        self.kubelet = EmbeddedKubelet(
            folder / "k", pod_resources_face=face, seed=seed, cdi_folder=folder / "cdi"
        )
        self.kubelet_up = anyio.Event()
        self.kubelet_up.set()
        self.kubelet_began = 0.0  # when it started last
        self.kubelet_delay = seams.KUBELET.delay
        self.checkpoint: tuple[bytes, bytes] | None = None  # as it was, and torn
        self.neighbour = Neighbour(seed)
        self.parts = Parts()
        self.http = HttpApi(self.kubelet.api)
        self.http.interfere = self.interfere
        self.daemons = DaemonTable(folder / "proc")
        node = self.kubelet.api.node_name
        self.extenders = Replicas(group, self.http, node, str(folder / API_SOCKET), seed)
        self.current: AgentRun | None = None
        self.runs: list[AgentRun] = []  # that may not have ended, did so by themselves or too late
        self.lives = 0
        self.killed = 0  # how often the agent was, once at the end of every storm
        self.api_delay = 0.0
        self.api_faults: list[int] = []  # HTTP status of the next calls that fail, newest last
        self.outage = 0.0  # when the last long one of the API server ended
        self.dropped: dict[str, float] = {}  # resources whose stream the kubelet lost, and when
        self.unanswered = 0.0  # the same, of those in which calls had no answer
        self.refused = -math.inf  # when it refused a call last
        self.lost_answers = 0  # so many next writes are carried out but answered with a cut connection
        self.writes: list[tuple[float, str]] = []
        self.pods: list[PodSpec] = []  # that nobody has deleted yet
        self.made = 0
        self.created: dict[tuple[str, str], float] = {}  # when, by namespace and name
        self.lost_devices = LostDevices(self.kubelet)
        self.lost: set[int] = set()  # slots of GPUs that are off the bus
        self.struck: set[int] = set()  # slots of GPUs that may need more than time after an Xid
        # Processes of pods that were deleted by force: the GPU's slot and UUID, the pod's UID, and when.
        self.outliving: dict[int, tuple[int, str, str, float]] = {}
        self.hurt: dict[int, float] = {}  # when a GPU had its last Xid, or came back
        self.nvml_faults = 0
        self.nvml_well = -1e9  # since when NVML works again
        self.tainted: float | None = None  # since when the agent's taint stands
        self.on_write: list[Callable[[str, str, object], None]] = []  # method, path, body
        self.on_refused: list[Callable[[str, str, object], None]] = []  # the same

    def settings(self) -> Settings:
        """The agent's configuration."""
        folder = self.folder
        return Settings(
            modes=Modes(mps=self.shape.mps),
            mps=Mps(control_program=str(folder / "bin" / "nvidia-cuda-mps-control")),
            vgpu=Vgpu(enforcement="library", resize=True, library=str(folder / "bin" / LIBRARY))
            if self.shape.resize
            else Vgpu(),
            layouts={
                "mixed": [LayoutEntry(gpus=["0"], mode="pgpu"), LayoutEntry(gpus=["rest"], mode="vgpu")],
                "shared": [LayoutEntry(gpus=["0"], mode="mps"), LayoutEntry(gpus=["rest"], mode="vgpu")]
                if self.shape.mps
                else [LayoutEntry(gpus=["0-99"], mode="vgpu")],
                **(self._parted() if self.shape.mig else {}),
                **(DOORS if self.shape.claims else {}),
            },
            dra=Dra(enabled=self.shape.claims),
            mig=Mig(manage=self.shape.mig),
            http=HttpSettings(address="127.0.0.1", port=0),
            kubelet=Kubelet(root=str(self.kubelet.root)),
            cluster=ClusterSettings(
                access="required", node_name=self.kubelet.api.node_name, extender=self.shape.extender
            ),
            host=HostSettings(
                state=str(folder / "state"),
                run=str(folder / "run"),
                cdi=str(folder / "cdi"),
                proc=str(folder / "proc"),
                sysfs=str(folder / "sys"),
                cgroups=str(folder / "cgroup"),
            ),
            health=HealthSettings(kernel_log=None, probe_seconds=PROBE_SECONDS),
            sampling=Sampling(interval_seconds=30.0),
        )

    def _parted(self) -> dict[str, list[LayoutEntry]]:
        rest = LayoutEntry(gpus=["rest"], mode="vgpu")
        parted: list[str | int] = [self.machine.uuid(PARTED)]
        return {
            word: [LayoutEntry(gpus=parted, mode="mig", mig=names), rest] for word, names in PARTS.items()
        }

    # The agent

    async def start_agent(self, *, beside: bool = False) -> None:
        """Start it, unless it runs. `beside`: next to one that runs."""
        if self.current is not None and not self.current.ended.is_set() and not beside:
            return
        self.lives += 1
        self.current = AgentRun(self.lives, self.settings(), self.machine)
        kept = [each for each in self.runs if not each.ended.is_set() or each.failure or each.overdue]
        self.runs = [*kept, self.current]
        # A context of its own: whose files and calls these are is found by a context variable.
        contextvars.copy_context().run(self.group.start_soon, self.current.run)

    async def kill_agent(self) -> None:
        """SIGKILL."""
        self.killed += 1
        for run in self.runs:
            await run.kill()

    async def terminate_agent(self) -> None:
        """SIGTERM."""
        if self.current is not None:
            await self.current.terminate()

    @property
    def running(self) -> Agent | None:
        """The agent that runs."""
        current = self.current
        return current.agent if current is not None and not current.ended.is_set() else None

    # The node

    async def restart_kubelet(
        self,
        down: float,
        *,
        reboot: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Stop it; it comes back `down` seconds later, beside what happens in the meantime.

        `meanwhile` is called once it has stopped, `after` once it has started.
        """
        self.kubelet_up = anyio.Event()
        self.lost_devices.stopping(self.running, self.lives)
        await self.kubelet.stop()
        meanwhile()
        if reboot:
            self.lost_devices.rebooted()
            self.kubelet._machine.containers.reboot()
            self.machine.reboot()
            self.parts.booted()
            # It is believed for one boot, and that of the machine of the tests goes on.
            (self.folder / "state" / INSTANCES).unlink(missing_ok=True)
            shutil.rmtree(self.folder / "run", ignore_errors=True)

        async def start() -> None:
            await anyio.sleep(down)
            await self.kubelet.start()
            self.lost_devices.started()
            self.neighbour.register(self.kubelet)
            after()
            self.kubelet_began = anyio.current_time()
            self.kubelet_up.set()

        self.group.start_soon(start)

    def clear_nvml_faults(self) -> None:
        """All calls to NVML work again; those that hang return."""
        self.machine.clear_faults()
        self.nvml_faults, NvmlFaults.standing = 0, False
        self.nvml_well = anyio.current_time()
        # Nothing was probed: quiet times begin now.
        self.hurt |= dict.fromkeys(self.hurt, self.nvml_well)
        seams.NVML.wake(lifted=True)

    def label(self, word: str | None) -> None:
        """Ask for a mode."""
        self.http.set_label(LABEL, word)

    async def follow_taint(self) -> None:
        """Keep `tainted` true, for ever."""
        changes = self.kubelet.api.changes
        while True:
            stands = any(each["key"] == TAINT for each in self.kubelet.api.taints)
            if not stands:
                self.tainted = None
            elif self.tainted is None:
                self.tainted = anyio.current_time()
            await changes.wait_change(changes.version)

    @property
    def api_well(self) -> bool:
        """Whether calls to the API server are answered as they should be; watches may be mute."""
        return self.http.reachable and not self.api_faults and not self.api_delay and not self.lost_answers

    async def interfere(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Delays, refusals and lost answers of the API server. Writes of the agent are counted."""
        write = request.method != "GET" and request.headers.get(seams.CALLER) == seams.AGENT
        if self.api_delay:
            await anyio.sleep(self.api_delay)
        if write:
            body = None if request.method == "DELETE" else await request.json()
            self.writes.append((anyio.current_time(), f"{request.method} {request.path}"))
        if self.api_faults:
            status, self.refused = self.api_faults.pop(), anyio.current_time()
            if write:
                for observer in self.on_refused:
                    observer(request.method, request.path, body)
            return web.json_response({"kind": "Status", "message": "storm", "code": status}, status=status)
        if write:
            for observer in self.on_write:
                observer(request.method, request.path, body)
        response = await handler(request)
        if request.method != "GET" and self.lost_answers:
            self.lost_answers -= 1
            if request.transport is not None:
                request.transport.abort()
        return response


@asynccontextmanager
async def world(folder: Path, seed: int, shape: Shape, *, sockets: bool = True) -> AsyncIterator[World]:
    """A node without an agent; everything on it is gone at the end. `sockets`: the API server has one."""
    socket = folder / API_SOCKET
    direct_http.install(sockets=sockets)
    seams.install(str(socket))
    cheaper.install()
    ordering.install()
    NvmlFaults.standing = False
    CLOCK.stepped = 0.0
    seams.KUBELET.calm()
    seams.KUBELET.delay[0] = 0.0
    machine = SimulatedMachine.create(WITH_MIG if shape.mig else PROFILE, hidden=[SPARE])
    if shape.mig:
        machine.set_mig(PARTED, enabled=True)
    for each in ("bin", "cdi", "proc", "sys", "cgroup"):
        (folder / each).mkdir()
    # The host's processes as far as they tell that they are the host's, and the agent among them.
    for each, name, text in (("2", "comm", "kthreadd"), ("self", "cgroup", AGENT_CGROUP)):
        (folder / "proc" / each).mkdir()
        (folder / "proc" / each / name).write_text(f"{text}\n")
    program = folder / "bin" / "nvidia-cuda-mps-control"
    program.touch(mode=0o755)
    (folder / "bin" / LIBRARY).write_bytes(ELF)  # nobody loads it
    if shape.claims:
        uuids = [machine.uuid(slot) for slot in range(SPARE + 1)]
        # NVIDIA's toolkit writes it again where instances come: here it names all that there may be.
        parts = [f"MIG-{uuids[PARTED][4:-2]}{number:02x}" for number in range(16)] if shape.mig else []
        _write_specification(folder / "cdi", uuids + parts)
    async with anyio.create_task_group() as group:
        made = World(folder, machine, group, seed, shape)
        if shape.claims:
            for word in WORDS.values():
                made.kubelet.api.resources.create(CLASSES, _device_class(word))
        mps_daemons.install(made.daemons)
        group.start_soon(made.follow_taint)
        async with made.kubelet.running(), made.http.serving(socket):
            made.neighbour.register(made.kubelet)
            if shape.extender:
                made.kubelet.scheduler.extender = made.extenders
                await made.extenders.calm()
            try:
                yield made
            finally:
                with anyio.CancelScope(shield=True):
                    await made.kill_agent()
                    made.killed += await made.extenders.close()
                    await made.kubelet_up.wait()
                made.daemons.close()
            group.cancel_scope.cancel()


def _write_specification(folder: Path, uuids: list[str]) -> None:
    """CDI devices of the GPUs, as NVIDIA's toolkit has them: claims bring GPUs by CDI alone."""
    devices = [{"name": uuid, "containerEdits": {"env": [f"GPU={uuid}"]}} for uuid in uuids]
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}
    (folder / "nvidia.json").write_text(json.dumps(spec))


def _device_class(word: str) -> Mapping[str, Any]:
    rule = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].mode == '{word}'"
    return {"metadata": {"name": f"gpu-{word}"}, "spec": {"selectors": [{"cel": {"expression": rule}}]}}
