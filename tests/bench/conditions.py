"""The conditions of every figure: those of the image, on a simulated DGX H200.

The agent is a process of its own, in an environment with the runtime lock only (the tool chain brings
packages that libraries import when they find them), as byte code without docstrings; the real NVML
binding runs on the C double, and the embedded kubelet is its peer unless a figure says otherwise.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from agent.simulator.kubelet import EmbeddedKubelet, Timings
from agent.simulator.machine import SimulatedMachine
from tests.bench.agent import BenchAgent
from tests.cluster.agent_process import AgentProcess
from tests.cluster.build import missing_parts
from tests.nvml_double.build import STATE_VARIABLE, build

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
PROFILE = "dgx-h200"
# The default mode of the bench, and the resources whose sockets must then answer.
MODE = "pgpu"
RESOURCES = ("nvidia.com/gpu",)


class Conditions:
    """Makes nodes with an agent on them; everything is gone when a node's context ends."""

    def __init__(self, interpreter: Sequence[str], library: Path) -> None:
        self.interpreter = tuple(interpreter)
        self.library = library

    @classmethod
    def prepare(cls) -> "Conditions":
        """Make the runtime environment and the C double, where they are not there yet. Blocks."""
        subprocess.run([ROOT / ".ci" / "venv", "runtime", BUILD / "venv"], check=True, cwd=ROOT)
        return cls([str(BUILD / "venv" / "bin" / "python"), "-OO"], build(BUILD / "nvml"))

    def environment(self, machine: Path) -> dict[str, str]:
        """Environment of the agent's process beside the bench's own."""
        return {
            STATE_VARIABLE: str(machine),
            "MALLOC_ARENA_MAX": "2",
            "PYTHONNODEBUGRANGES": "1",
            # Byte code of the first start is kept apart from the tree and used by all later ones.
            "PYTHONPYCACHEPREFIX": str(BUILD / "pyc"),
            "PYTHONDONTWRITEBYTECODE": "",
        }

    def process(self, folder: Path) -> AgentProcess:
        """The agent, not started yet."""
        machine = folder / "machine"
        return AgentProcess(folder, self.environment(machine), lambda _: None, interpreter=self.interpreter)

    def settings(self, folder: Path) -> dict[str, object]:
        """Configuration keys of a node in `folder`."""
        return {
            "defaultMode": MODE,
            "logging.format": "json",
            "http.address": "127.0.0.1",
            "http.port": 0,
            "cluster.access": "off",
            "kubelet.root": str(folder / "k"),
            "driver.root": str(folder),
            "driver.library": str(self.library),
            "host.sysfs": str(folder / "sys"),
            "host.state": str(folder / "state"),
            "host.run": str(folder / "run"),
            "host.cdi": str(folder / "cdi"),
            "injection.strategy": "envvar",
        }

    @asynccontextmanager
    async def node(
        self, extra: Mapping[str, object] | None = None, profile: str = PROFILE
    ) -> AsyncIterator["Node"]:
        """A node with its kubelet; the agent is not started."""
        folder = Path(await anyio.mkdtemp(prefix="gnb-"))
        try:
            machine = await anyio.to_thread.run_sync(SimulatedMachine.create, profile, folder / "machine")
            await anyio.to_thread.run_sync(machine.write_sysfs, folder / "sys")
            (folder / "cdi").mkdir()
            kubelet = EmbeddedKubelet(
                folder / "k", cdi_folder=folder / "cdi", timings=Timings(registry_poll=0.2)
            )
            async with kubelet.running():
                agent = BenchAgent(self.process(folder), self.settings(folder) | dict(extra or {}))
                try:
                    yield Node(folder, machine, kubelet, agent)
                finally:
                    with anyio.CancelScope(shield=True):
                        await agent.kill()
        finally:
            await anyio.to_thread.run_sync(shutil.rmtree, folder)

    @asynccontextmanager
    async def serving(
        self, extra: Mapping[str, object] | None = None, profile: str = PROFILE
    ) -> AsyncIterator["Node"]:
        """A node whose agent is registered for every resource."""
        async with self.node(extra, profile) as node:
            await node.agent.start()
            await node.agent.ready()
            yield node

    async def warm_up(self) -> None:
        """Start the agent once, so that no figure pays for compiling byte code or a cold disk."""
        async with self.serving() as node:
            await node.agent.scrape()


class Node:
    """One simulated node: its folder, its GPUs, its kubelet and its agent."""

    def __init__(
        self, folder: Path, machine: SimulatedMachine, kubelet: EmbeddedKubelet, agent: BenchAgent
    ) -> None:
        self.folder = folder
        self.machine = machine
        self.kubelet = kubelet
        self.agent = agent

    def socket(self, resource: str = RESOURCES[0]) -> Path:
        """Where the agent serves a resource for the plugin watcher."""
        vendor, _, name = resource.partition("/")
        return self.folder / "k" / "plugins_registry" / f"gna-{vendor.split('.')[0]}-{name}.sock"


def to_build(*, cluster: bool) -> Iterator[str]:
    """Parts that are built before the first figure, and how long that takes on two cores."""
    if not (BUILD / "venv" / "bin" / "python").exists():
        yield "to build first: the runtime environment from its lock (half a minute)"
    if cluster:
        yield from (f"to build first: {each}" for each in missing_parts())


def short_folder() -> Path:
    """A folder whose path leaves room for unix sockets."""
    return Path(tempfile.mkdtemp(prefix="gnb-"))


def load_average() -> float:
    """Processes that wanted to run, over the last minute: figures of a busy machine are too large."""
    return os.getloadavg()[0]
