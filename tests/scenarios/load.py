"""Pods of all kinds that come and go at more demand than there is, where an extender chooses their GPUs."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.pace import scaled
from tests.scenarios.rig import Rig
from tests.scenarios.vgpu import CORES, share

MOST_PODS = 2  # that run or wait, for each GPU: always some wait
LOOK_SECONDS = 0.25
EMPTY_SECONDS = 90.0


def load_seconds(usual: float) -> float:
    """How long the load lasts; `LOAD_SECONDS=600` by hand."""
    return float(os.environ.get("LOAD_SECONDS", usual))


def mix(blocks: int, seed: int) -> Iterator[PodSpec]:
    """Pods without an end, for GPUs of so many blocks. Half of them complete, half run until deleted."""
    draw = random.Random(seed)

    def main(cores: int, memory: int) -> ContainerSpec:
        limits = share("", cores, memory).limits
        return ContainerSpec("main", limits, exits=draw.random() < 0.5, seconds=draw.uniform(1.0, 4.0))

    number = 0
    while True:
        number += 1
        cores = draw.choice((20, 35, 50, 65, 80))
        memory = max(1, blocks * draw.choice((10, 30, 60, 100)) // 100)
        init = share("init", draw.choice((20, 50, 90)), max(1, blocks // 3))
        init = ContainerSpec("init", init.limits, seconds=draw.uniform(0.2, 2.0))
        kind = draw.choices(
            ("share", "whole", "memory", "init", "init-only", "sidecar"), (50, 15, 10, 15, 5, 5)
        )[0]
        name = f"{kind}-{number}"
        match kind:
            case "share":
                yield PodSpec(name, (main(cores, memory),))
            case "whole":
                yield PodSpec(name, (main(CORES * draw.choice((1, 1, 2)), 0),))
            case "memory":
                yield PodSpec(name, (main(0, memory),))
            case "init":
                yield PodSpec(name, (main(cores // 2, max(1, memory // 4)),), init_containers=(init,))
            case "init-only":
                yield PodSpec(name, (main(0, 0),), init_containers=(init,))
            case _:
                beside = share("beside", 10, 1, restartable=True)
                yield PodSpec(name, (main(cores // 2, max(1, memory // 4)),), init_containers=(beside,))


@dataclass
class Load:
    """The pods that came, ran and died."""

    rig: Rig
    died: dict[str, str] = field(default_factory=dict)
    ran: Counter[str] = field(default_factory=Counter)
    waited: set[str] = field(default_factory=set)
    _there: dict[str, PodSpec] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    async def run(self, pods: Iterator[PodSpec], most: int, seconds: float) -> None:
        """Keep so many pods there, that run or wait, for so long; then wait until all have had their turn."""
        end = anyio.current_time() + seconds
        while anyio.current_time() < end:
            while len(self._there) < most:
                pod = next(pods)
                self._there[pod.name] = pod
                await self.rig.create_pod(pod)
            await self._look()
            await anyio.sleep(LOOK_SECONDS)
        with anyio.move_on_after(scaled(EMPTY_SECONDS)):
            while self._there:
                await self._look()
                await anyio.sleep(LOOK_SECONDS)
            return
        raise TimeoutError(f"pods wait for ever: {await self.rig.all_pods()}")

    async def _look(self) -> None:
        now = anyio.current_time()
        for name, (phase, reason, message) in (await self.rig.all_pods()).items():
            pod = self._there.get(name)
            if pod is None:
                continue
            if phase is Phase.FAILED:
                self.died[name] = f"{reason}: {message}"
            elif phase is Phase.PENDING:
                self.waited |= {name} if reason == "Unschedulable" or not reason else set()
                continue
            elif phase is Phase.RUNNING:
                until = self._until.setdefault(name, now + pod.containers[0].seconds)
                if pod.containers[0].exits or now < until:
                    continue
            if phase is not Phase.FAILED:
                self.ran[name.rpartition("-")[0]] += 1
            await self.rig.ask_to_delete(self._there.pop(name))


async def full_load_with_departures(rig: Rig, gpus: int, blocks: int, seconds: float) -> None:
    """0 admission failures, and every kind of pod has run."""
    load = Load(rig)
    await load.run(mix(blocks, seed=23), MOST_PODS * gpus, load_seconds(seconds))
    print(f"{load.ran.total()} pods ran ({dict(load.ran)}), {len(load.died)} died")
    assert not load.died, f"{len(load.died)} of {load.ran.total() + len(load.died)}: {load.died}"
    assert len(load.ran) == 6, load.ran
    assert load.waited
