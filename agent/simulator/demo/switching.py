"""The act of the switch: one label, three modes, a GPU that is busy, and the milliseconds it takes."""

import json
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from agent.app import run as app
from agent.app.agent import Agent
from agent.model.pod import CORES, MPS, VGPU
from agent.modes.desired import LABEL
from agent.node.conditions import MODE_LABEL, STATE_ANNOTATION
from agent.simulator.demo.mps_pods import tear_down
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import GPU, Stage, gpu_pod
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.nvml import SimulatedNvml

# What a mode's GPUs are counted by, and how many of it each gives.
OFFERED = {"pgpu": (GPU, 1), "vgpu": (VGPU.core, CORES), "mps": (MPS.core, CORES)}
TITLES = {"pgpu": "whole GPUs", "vgpu": "fractions", "mps": "MPS shares"}


async def switching(stage: Stage, screen: Screen, number: int) -> None:
    """Clear the node, start the agent with no mode of its own, and let the label speak."""
    await stage.clear()
    async with stage.api() as (http, access):
        more = {"defaultMode": "none", **access, **await stage.with_mps()}
        configuration = await anyio.to_thread.run_sync(stage.settings, more)
        screen.act(number, "One label switches the node, live")
        async with app.running(configuration, SimulatedNvml(stage.machine)) as agent:
            act = _Act(stage, screen, http, agent)
            try:
                await act.play()
            finally:
                with anyio.CancelScope(shield=True):
                    await act.hand_back()


class _Act:
    def __init__(self, stage: Stage, screen: Screen, http: HttpApi, agent: Agent) -> None:
        self._stage = stage
        self._screen = screen
        self._http = http
        self._agent = agent
        self._count = len(stage.machine.uuids)

    async def play(self) -> None:
        """pGPU, vGPU with one GPU that drains, MPS, and pGPU again."""
        stage, screen, rest = self._stage, self._screen, self._count - 1
        await self._switched("pgpu", self._count, first=True)
        train = gpu_pod("train", 1)
        await stage.run(train)
        busy = self._index_of_holder()
        screen.seen(f"train runs on GPU {busy}. Now the label says vgpu:")
        took = await self._label("vgpu", rest)
        await stage.wait(lambda: self._waits(busy) > 0, lambda: f"GPU {busy} does not drain: {self._state()}")
        screen.seen(f"{took:.0f} ms later {_gpus(rest)} offered as fractions. GPU {busy} drains:")
        screen.say(f"  {self._state()['message']}")
        stage.check(stage.kubelet.api.allocatable.get(GPU, 0) == 0, "a draining GPU is still offered")
        await stage.delete(train)
        took = await self._offers("vgpu", self._count)
        screen.seen(f"train ends; {took:.0f} ms later GPU {busy} has flipped, too.")
        await self._switched("mps", self._count)
        await self._switched("pgpu", self._count)
        opened = {
            each.plugin.resource: each.service.stats.streams_opened
            for each in self._agent.core.readiness.endpoints
        }
        stage.check(set(opened.values()) == {1}, f"streams were opened again: {opened}")
        screen.seen(
            f"{len(opened)} resources, one stream each from first to last: nothing was registered again."
        )

    async def _switched(self, mode: str, gpus: int, *, first: bool = False) -> None:
        took = await self._label(mode, gpus)
        await self._stage.wait(
            lambda: self._http.labels.get(MODE_LABEL) == mode,
            lambda: f"the node's label says {self._http.labels.get(MODE_LABEL)}",
        )
        how = "The label says" if first else "Then"
        self._screen.seen(f"{how} {mode}: {took:.0f} ms later {_gpus(gpus)} offered as {TITLES[mode]}.")

    async def _label(self, mode: str, gpus: int) -> float:
        """Label the node; milliseconds until it offers so many GPUs in that mode."""
        await anyio.sleep(1.1)  # a label that changes twice within a second is taken for a flapping one
        self._http.set_label(LABEL, mode)
        return await self._offers(mode, gpus)

    async def _offers(self, mode: str, gpus: int) -> float:
        resource, each = OFFERED[mode]
        kubelet = self._stage.kubelet
        seconds = await self._stage.wait(
            lambda: kubelet.api.allocatable.get(resource) == gpus * each,
            lambda: f"the node offers {dict(kubelet.api.allocatable)}, not {gpus * each} of {resource},",
        )
        return seconds * 1000

    def _state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(self._http.annotations.get(STATE_ANNOTATION, "{}"))
        return found

    def _waits(self, index: int) -> int:
        gpu = self._state().get("gpus", {}).get(str(index), {})
        return int(gpu.get("waitingFor", 0))

    def _index_of_holder(self) -> int:
        holders = self._stage.holders()
        self._stage.check(len(holders) == 1, f"GPUs are held by {holders}")
        return self._stage.machine.uuids.index(next(iter(holders)))

    async def hand_back(self) -> None:
        """Stop daemons that an act which was cut short would leave behind."""
        await tear_down(self._agent)


def _gpus(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"
