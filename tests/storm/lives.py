"""Lives of processes in a storm: of the agent, and of the extender's replicas."""

import asyncio
import contextlib

import anyio

from agent.app import run as app
from agent.app.agent import Agent
from agent.settings import Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.storm import seams

STOP_SECONDS = 10.0  # between SIGTERM and the end; an agent that withdraws takes 7.5 s of them at most


class Process:
    """One life of a process of ours, from its start to its end."""

    def __init__(self, number: int) -> None:
        self.life = seams.Life(number)
        self.failure: BaseException | None = None
        self.ended = anyio.Event()
        self.overdue = False  # it did not end in time after SIGTERM
        self.began = anyio.current_time()
        self.stop = anyio.Event()
        self._scope = anyio.CancelScope()

    async def serve(self) -> None:
        """The work, until `stop` is set."""
        raise NotImplementedError

    async def run(self) -> None:
        """Live. An end that nobody asked for is kept in `failure`."""
        seams.LIFE.set(self.life)
        try:
            with self._scope:
                await self.serve()
            if not self.stop.is_set() and not self.life.dead:
                self.failure = RuntimeError("it ended, and nobody had asked for that")
        except BaseException as error:
            if not self.life.dead:  # a cancellation, too, is one that nobody asked for
                self.failure = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.ended.set()

    async def terminate(self) -> None:
        """SIGTERM, and SIGKILL where it takes too long."""
        self.stop.set()
        with anyio.move_on_after(STOP_SECONDS):
            await self.ended.wait()
            return
        self.overdue = not self.life.dead
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL: nothing that it does from here on has an effect."""
        self.life.dead = True
        self._scope.cancel()
        self.stop.set()
        await self.ended.wait()


class AgentRun(Process):
    """One life of the agent."""

    def __init__(self, number: int, settings: Settings, machine: SimulatedMachine) -> None:
        super().__init__(number)
        self.agent: Agent | None = None
        self._settings = settings
        self._machine = machine

    async def serve(self) -> None:
        """The agent, until it is to stop."""
        with contextlib.suppress(app.StoppedEarly):
            async with app.running(self._settings, SimulatedNvml(self._machine), self.stop) as self.agent:
                await self.stop.wait()
