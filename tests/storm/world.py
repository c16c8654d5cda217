"""The world of a storm: GPUs, a kubelet, an API server and one node agent in this process."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from aiohttp import web
from anyio.abc import TaskGroup

from agent.app import run as app
from agent.app.agent import Agent
from agent.model.modes import Mode
from agent.modes.desired import LABEL
from agent.settings import Cluster, Health, Host, Http, Kubelet, LayoutEntry, Modes, Sampling, Settings
from agent.simulator.kubelet import EmbeddedKubelet
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.kubelet.pods import PodSpec
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.storm import seams

STOP_SECONDS = 10.0  # what the chart grants an agent between SIGTERM and SIGKILL is more


class AgentRun:
    """One life of the agent, from its start to its end."""

    def __init__(self, number: int, settings: Settings, machine: SimulatedMachine) -> None:
        self.life = seams.Life(number)
        self.agent: Agent | None = None
        self.failure: BaseException | None = None
        self.ended = anyio.Event()
        self._settings = settings
        self._machine = machine
        self._stop = anyio.Event()
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """Live. An end that nobody asked for is kept in `failure`."""
        seams.LIFE.set(self.life)
        try:
            with self._scope, contextlib.suppress(app.StoppedEarly):
                async with app.running(
                    self._settings, SimulatedNvml(self._machine), self._stop
                ) as self.agent:
                    await self._stop.wait()
        except BaseException as error:
            if not self.life.dead and not isinstance(error, asyncio.CancelledError):
                self.failure = error
            elif isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.ended.set()

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL where it takes too long."""
        self._stop.set()
        with anyio.move_on_after(STOP_SECONDS):
            await self.ended.wait()
            return
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL: nothing that it does from here on has an effect."""
        self.life.dead = True
        self._scope.cancel()
        self._stop.set()
        await self.ended.wait()


class World:
    """Made by `world`."""

    def __init__(self, folder: Path, machine: SimulatedMachine, group: TaskGroup, seed: int) -> None:
        self.folder = folder
        self.machine = machine
        self.group = group
        self.kubelet = EmbeddedKubelet(folder / "k", seed=seed, cdi_folder=folder / "cdi")
        self.http = HttpApi(self.kubelet.api)
        self.http.interfere = self.interfere
        self.current: AgentRun | None = None
        self.lives = 0
        self.api_delay = 0.0
        self.api_faults: list[int] = []  # HTTP status of the next calls that fail, newest last
        self.lost_answers = 0  # so many next writes are carried out but answered with a cut connection
        self.writes: list[tuple[float, str]] = []
        self.pods: list[PodSpec] = []  # that nobody has deleted yet
        self.made = 0
        self.lost: set[int] = set()  # slots of GPUs that are off the bus
        self.nvml_faults = 0
        self.disturbed = 0.0  # when something was last wrong with the node, or its mode was changed

    def settings(self) -> Settings:
        """The agent's configuration."""
        folder = self.folder
        return Settings(
            modes=Modes(mps=False),
            layouts={
                "mixed": [LayoutEntry(gpus=["0"], mode="pgpu"), LayoutEntry(gpus=["rest"], mode="vgpu")]
            },
            http=Http(address="127.0.0.1", port=0),
            kubelet=Kubelet(root=str(self.kubelet.root)),
            cluster=Cluster(access="required", node_name=self.kubelet.api.node_name),
            host=Host(
                state=str(folder / "state"),
                run=str(folder / "run"),
                cdi=str(folder / "cdi"),
                proc=str(folder / "proc"),
                sysfs=str(folder / "sys"),
                cgroups=str(folder / "cgroup"),
            ),
            health=Health(kernel_log=None),
            sampling=Sampling(interval_seconds=30.0),
        )

    # The agent

    async def start_agent(self) -> None:
        """Start it, unless it runs."""
        if self.current is not None and not self.current.ended.is_set():
            return
        self.lives += 1
        self.disturbed = anyio.current_time()
        self.current = AgentRun(self.lives, self.settings(), self.machine)
        # A context of its own: whose files and calls these are is found by a context variable.
        contextvars.copy_context().run(self.group.start_soon, self.current.run)

    async def kill_agent(self) -> None:
        """SIGKILL."""
        if self.current is not None:
            await self.current.kill()

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

    def label(self, word: str | None) -> None:
        """Ask for a mode."""
        self.http.set_label(LABEL, word)

    def modes_of_lists(self) -> dict[str, set[Mode]]:
        """GPU -> the modes on whose lists it stands; lists of plugins that are gone do not count."""
        life = self.kubelet._life
        found: dict[str, set[Mode]] = {}
        for resource, endpoint in life.devices.tables.endpoints.items() if life else ():
            if endpoint.stopped_at is None and endpoint.calls is not None:
                mode = Mode.VGPU if resource.startswith("tencent.com") else Mode.PGPU
                for device in life.devices.tables.all.get(resource, ()) if life else ():
                    found.setdefault(device.partition("::")[0], set()).add(mode)
        return found

    async def interfere(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Delays, refusals and lost answers of the API server."""
        write = request.method != "GET"
        if self.api_delay:
            await anyio.sleep(self.api_delay)
        if self.api_faults:
            status = self.api_faults.pop()
            return web.json_response({"kind": "Status", "message": "storm", "code": status}, status=status)
        if write:
            body = await request.text()
            self.writes.append((anyio.current_time(), f"{request.method} {request.path} {body}"))
        response = await handler(request)
        if write and self.lost_answers:
            self.lost_answers -= 1
            if request.transport is not None:
                request.transport.abort()
        return response


@asynccontextmanager
async def world(folder: Path, seed: int, profile: str = "l40s-2") -> AsyncIterator[World]:
    """A node without an agent; everything on it is gone at the end."""
    socket = folder / "api.sock"
    seams.install(str(socket))
    seams.KUBELET.started = anyio.current_time()
    machine = SimulatedMachine.create(profile)
    for each in ("cdi", "proc", "sys", "cgroup"):
        (folder / each).mkdir()
    async with anyio.create_task_group() as group:
        made = World(folder, machine, group, seed)

        async with (
            made.kubelet.running(),
            made.http.serving(socket),
        ):
            try:
                yield made
            finally:
                with anyio.CancelScope(shield=True):
                    await made.kill_agent()
            group.cancel_scope.cancel()
