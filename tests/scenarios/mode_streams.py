"""Switches and updates under a stream of pods, and a label that cannot make up its mind."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from tests.pace import scaled
from tests.scenarios.mode_node import GPUS, ModeNode, mode_node, pod_of
from tests.scenarios.rig import GPU, Rig

PODS_PER_SECOND = 5
# While so many wait no more are created: the test asks for trouble, not for a queue without an end.
MOST_PODS = 60
LIFE_SECONDS = 1.0
CYCLE = ("vgpu", "mps", "pgpu")
FLIPS = 100  # in six seconds: the pace of a thousand a minute


def switches() -> int:
    """How many switches the long scenario makes; `SWITCHES=100` by hand."""
    return int(os.environ.get("SWITCHES", "30"))


@dataclass
class Stream:
    """Pods that come five a second and go a second after they began to run."""

    rig: Rig
    modes: Sequence[str]  # in turn, one a pod
    ran: set[str] = field(default_factory=set)
    failed: dict[str, tuple[Phase, str, str]] = field(default_factory=dict)
    created: dict[str, PodSpec] = field(default_factory=dict)
    _running_since: dict[str, float] = field(default_factory=dict)
    _stopped: bool = False
    _over: bool = False

    async def run(self) -> None:
        """Create until stopped, delete until it is over."""
        began = anyio.current_time()
        number = 0
        while not self._over:
            if self._stopped or len(self.created) >= MOST_PODS:
                await self.look()
                await anyio.sleep(1 / PODS_PER_SECOND)
                began = anyio.current_time() - number / PODS_PER_SECOND
                continue
            mode = self.modes[number % len(self.modes)]
            pod = pod_of(mode, f"{mode}-{number}")
            self.created[pod.name] = pod
            await self.rig.create_pod(pod)
            number += 1
            await self.look()
            await anyio.sleep_until(began + number / PODS_PER_SECOND)

    def stop(self) -> None:
        """No more pods are created."""
        self._stopped = True

    async def empty(self, of: str = "", deadline: float = 90.0) -> None:
        """Wait until every pod, or every one of a mode, has run and is gone."""
        with anyio.move_on_after(scaled(deadline)):
            while any(name.startswith(of) for name in await self.rig.all_pods()):
                await anyio.sleep(0.2)
            return
        raise TimeoutError(f"pods are left after {deadline:g} s: {await self.rig.all_pods()}")

    def end(self) -> None:
        """All is seen."""
        self._over = True

    async def look(self) -> None:
        """See what became of the pods; delete those that have run long enough."""
        now = anyio.current_time()
        for name, (phase, reason, message) in (await self.rig.all_pods()).items():
            if name not in self.created:
                continue
            if phase is Phase.RUNNING:
                self.ran.add(name)
                if now - self._running_since.setdefault(name, now) >= LIFE_SECONDS:
                    await self.rig.ask_to_delete(self.created.pop(name))
            elif phase.finished:
                self.failed[name] = (phase, reason, message)
                await self.rig.ask_to_delete(self.created.pop(name))


async def test_no_admission_error_across_thirty_switches(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await node.want("pgpu")
        await node.offers("pgpu")
        stream = Stream(rig, ("pgpu",))
        count = switches()
        took: list[float] = []
        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            leaving = "pgpu"
            for number in range(count):
                entering = CYCLE[number % len(CYCLE)]
                # Half of the pods want what is being left, half what comes.
                stream.modes = (leaving, entering)
                await anyio.sleep(1.0)
                began = anyio.current_time()
                await node.want(entering)
                await node.reach("applied", entering, 120.0)
                took.append(anyio.current_time() - began)
                leaving = entering
            stream.stop()
            # Those that still wait for a mode run once it comes back.
            for mode in CYCLE:
                await node.want(mode)
                await node.reach("applied", mode, 120.0)
                await stream.empty(mode)
            stream.end()
        if stream.failed:
            for event in ("mode_wanted", "shrink_announced", "mode_state"):
                print(*await node.logged(event), sep="\n")
        assert not stream.failed, (
            f"{len(stream.failed)} of {len(stream.ran)}: {list(stream.failed.items())[:4]}"
        )
        assert len(stream.ran) > count
        middle = sorted(took)[len(took) // 2]
        print(f"{count} switches, {middle:.2f} s each (median): {len(stream.ran)} pods ran, 0 failed")


async def test_agent_update_under_a_stream_of_pods(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await node.want("pgpu")
        await node.offers("pgpu")
        stream = Stream(rig, ("pgpu",))
        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            for _ in range(5):
                await anyio.sleep(2.0)
                assert await rig.stop_agent() == 0
                await anyio.sleep(0.5)
                await node.start()
                await node.offers("pgpu")
            stream.stop()
            await stream.empty()
            stream.end()
        assert not stream.failed, stream.failed
        held = [each["held"] for each in await node.logged("all_withdrawn")]
        print(f"5 updates, the taint in time at {held.count(True)}: {len(stream.ran)} pods ran, 0 failed")


async def _usage(node: ModeNode) -> tuple[float, float]:
    return await node.metric("gpu_agent_process_open_fds"), await node.metric(
        r"gpu_agent_node_patches_total\{[^}]*\}"
    )


async def test_label_flapping(rig: Rig) -> None:
    async with mode_node(rig) as node:
        await node.want("vgpu")
        await node.applied("vgpu")
        await node.want("pgpu")
        await node.applied("pgpu")
        files, patches = await _usage(node)
        before = len(await node.logged("mode_wanted"))
        began = anyio.current_time()
        for number in range(FLIPS):
            await node.want(("vgpu", "pgpu", "disable", "nonsense")[number % 4])
            await anyio.sleep_until(began + number * 60 / 1000)
        await node.want("vgpu")
        await node.applied("vgpu")
        await node.offers("vgpu")
        assert not await rig.allocatable(GPU)
        seconds = anyio.current_time() - began
        files_after, patches_after = await _usage(node)
        made = patches_after - patches
        acted = len(await node.logged("mode_wanted")) - before
        print(f"{FLIPS} flips in {seconds:.1f} s: {acted} acted on, {made:.0f} patches of the node")
        # The last word is acted on, and the first unless one came just before; others only where a busy
        # machine held the flips up for a second. One writes taint, labels and condition twice, amounts in
        # up to four steps.
        assert 1 <= acted <= 2 + seconds / 2
        assert made <= 10 * acted
        assert files_after <= files + 8
        (pod,) = await node.run("vgpu", "after")
        assert 0 <= await node.index_of(pod) < GPUS
