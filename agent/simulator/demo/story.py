"""The demo, act by act. Every line is printed from what was seen, after it was checked."""

import anyio
import anyio.to_thread

from agent import __version__
from agent._proto.v1beta1 import Device
from agent.app import run as app
from agent.inventory.snapshot import Snapshot, boot_seconds
from agent.kit.tasks import Cell
from agent.model.health import Health, HealthState
from agent.simulator.demo.claims import claims
from agent.simulator.demo.fractions import fractions
from agent.simulator.demo.mps_pods import mps_shares
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import GPU, NotAsTold, Stage, gpu_pod
from agent.simulator.demo.switching import switching
from agent.simulator.kubelet import PodSpec
from agent.simulator.nvml import SimulatedNvml
from agent.simulator.profile import MIB

DOWN_SECONDS = 0.5
WATCH_SECONDS = 0.6  # several status ticks of the demo's kubelet


class Story:
    """The acts share the stage and what they left on it."""

    def __init__(self, stage: Stage, screen: Screen) -> None:
        self._stage = stage
        self._screen = screen
        self._count = len(stage.machine.uuids)
        self._bad: set[str] = set()  # unhealthy IDs of the newest list

    async def tell(self) -> None:
        """All acts, from the empty node to the empty node."""
        stage = self._stage
        self._introduce()
        configuration = await anyio.to_thread.run_sync(stage.settings)
        with stage.kubelet.observing_lists(self._list_seen):
            began = anyio.current_time()
            async with app.running(configuration, SimulatedNvml(stage.machine)) as agent:
                await self._agent_registers(began)
                waiting, leaving = await self._pods_are_admitted()
                await self._freed_gpu_is_used_again(waiting, leaving)
                await self._kubelet_restarts()
                await self._gpu_falls_and_returns(agent.core.inventory.snapshot)
                blockers = agent.core.readiness.blockers()
                stage.check(not blockers, f"the agent is not ready: {'; '.join(blockers)}")
                began = anyio.current_time()
            await self._agent_leaves(began)
        await fractions(stage, self._screen, number=7)
        await mps_shares(stage, self._screen, number=8)
        await switching(stage, self._screen, number=9)
        await claims(stage, self._screen, number=10)

    def _list_seen(self, resource: str, devices: list[Device]) -> None:
        if resource == GPU:
            self._bad = {device.id for device in devices if device.health != "Healthy"}
            self._stage.kubelet.api.changed()  # lists count as news for those who wait

    def _introduce(self) -> None:
        profile, screen = self._stage.profile, self._screen
        screen.title(f"gpu-node-agent {__version__} on a simulated node: {profile.title}")
        screen.say(
            f"The agent is the real one. The GPUs ({profile.model.product}) and the kubelet are simulated;"
        )
        screen.say("agent and kubelet talk gRPC over unix sockets, as on a node.")

    async def _agent_registers(self, began: float) -> None:
        stage, screen, count = self._stage, self._screen, self._count
        screen.act(1, "The agent starts")
        await stage.offers(count)
        took = anyio.current_time() - began
        driver = stage.profile
        cuda = ".".join(map(str, driver.cuda_version))
        screen.seen(f"It found {count} GPUs, driver {driver.driver_version}, CUDA {cuda}.")
        screen.seen(f"{took:.2f} s after its start the node offers {GPU}: {count}.")
        self._show_gpus()

    async def _pods_are_admitted(self) -> tuple[PodSpec, PodSpec]:
        stage, screen, count = self._stage, self._screen, self._count
        screen.act(2, "Pods ask for GPUs")
        notebook = gpu_pod("notebook", 1)
        pods = [gpu_pod("training", count // 2), notebook]
        if count >= 6:
            pods.insert(1, gpu_pod("service", 1, 1))
        await stage.run(*pods)
        for pod in pods:
            screen.seen(f"{pod.name} asked for {_amount(pod)} and got {self._gpus_of(pod)}.")
        stage.holders()
        screen.seen("Each container sees the device nodes of its own GPUs and of no other.")
        free = count - sum(pod.request(GPU) for pod in pods)
        late = gpu_pod("late", free + 1)
        stage.create(late)
        state = stage.kubelet.pod(late)
        await stage.wait(
            lambda: state.reason == "Unschedulable", lambda: f"pod late is {state.phase}, not waiting"
        )
        screen.seen(
            f"late asks for {_amount(late)}, {free} {'is' if free == 1 else 'are'} free: it stays Pending."
        )
        screen.say(f"  scheduler: {state.message}")
        self._show_gpus()
        return late, notebook

    async def _freed_gpu_is_used_again(self, late: PodSpec, notebook: PodSpec) -> None:
        stage, screen = self._stage, self._screen
        screen.act(3, "A pod ends, its GPU is used again")
        held = self._uuids_of(notebook)
        await stage.delete(notebook)
        took = await stage.runs(late)
        stage.check(held <= self._uuids_of(late), "the freed GPU was not used again")
        screen.seen(f"notebook is deleted; {took * 1000:.0f} ms later late runs on {self._gpus_of(late)}.")

    async def _kubelet_restarts(self) -> None:
        stage, screen = self._stage, self._screen
        screen.act(4, "The kubelet restarts, the agent does not")
        before = stage.holders()
        offered: list[int] = []
        with stage.kubelet.observing_node(lambda _, allocatable: offered.append(allocatable[GPU])):
            await stage.kubelet.restart(DOWN_SECONDS)
            up = anyio.current_time()
            known = stage.kubelet.known_devices
            await stage.wait(
                lambda: known(GPU) == self._count, lambda: f"the kubelet knows {known(GPU)} GPUs again,"
            )
            took = anyio.current_time() - up
            await anyio.sleep(WATCH_SECONDS)
        stage.check(offered == [], f"the node offered {offered} meanwhile")
        stage.check(stage.holders() == before, "a pod changed its GPUs")
        screen.seen(
            f"Down for {DOWN_SECONDS} s; {took * 1000:.0f} ms after its start it knew all GPUs again."
        )
        screen.seen(f"The node offered {self._count} all the time: no dip. Every pod kept its GPUs.")

    async def _gpu_falls_and_returns(self, inventory: Cell[Snapshot]) -> None:
        stage, screen, count = self._stage, self._screen, self._count
        screen.act(5, "A GPU falls off the bus and is reset")
        holders = stage.holders()
        uuid = min(holders, key=stage.machine.uuids.index)
        index = stage.machine.uuids.index(uuid)
        screen.say(f"GPU {index}, held by {holders[uuid]}, is gone from the bus: the driver reports Xid 79.")
        stage.machine.fall_off_bus(uuid)
        took = await stage.wait(
            lambda: self._bad == {uuid}, lambda: f"the kubelet holds {sorted(self._bad) or 'no GPU'} for bad"
        )
        await stage.offers(count - 1)
        screen.seen(
            f"{took * 1000:.0f} ms later the kubelet knew: GPU {index} Unhealthy, all others Healthy."
        )
        screen.seen(f"The node offers {count - 1}. {holders[uuid]} runs on; nobody new gets that GPU.")
        self._show_gpus({other for other in holders if holders[other] == holders[uuid]})
        # A reset that is over before a probe missed the GPU would not be seen as one.
        with anyio.move_on_after(stage.patience):
            await inventory.wait_for(lambda value: value.by_uuid[uuid].health.away)
        screen.say("The GPU is reset and answers again.")
        stage.machine.restore(uuid)
        health = await self._on_probation(inventory, uuid)
        quiet = (health.until or health.since) - health.since
        screen.seen(f"It is not offered yet: first {quiet:g} s must pass without a new fault.")
        if quiet < stage.patience:
            await stage.offers(count)
            early = health.since + quiet - boot_seconds()
            stage.check(early <= 0, f"the GPU was trusted again {early:.1f} s too early")
            screen.seen(f"They have passed, and its probes with them: the node offers {count} again.")

    async def _on_probation(self, inventory: Cell[Snapshot], uuid: str) -> Health:
        """The GPU's health once its probes pass again."""
        with anyio.move_on_after(self._stage.patience):
            known = await inventory.wait_for(
                lambda value: value.by_uuid[uuid].health.state is HealthState.PROBATION
            )
            return known.by_uuid[uuid].health
        state = inventory.value.by_uuid[uuid].health.state.value
        raise NotAsTold(f"the agent still has the GPU for {state} after {self._stage.patience:g} s")

    async def _agent_leaves(self, began: float) -> None:
        stage, screen = self._stage, self._screen
        screen.act(6, "The agent stops")
        took = anyio.current_time() - began
        left = await anyio.to_thread.run_sync(
            lambda: list((stage.kubelet.root / "plugins_registry").iterdir())
        )
        stage.check(not left, f"sockets are left: {[path.name for path in left]}")
        await stage.offers(0)
        for pod in stage.pods:
            await stage.runs(pod)
        screen.seen(
            f"Gone in {took * 1000:.0f} ms, its sockets with it. The node offers 0, running pods run on."
        )

    # Looking

    def _uuids_of(self, pod: PodSpec) -> set[str]:
        holders = self._stage.holders()
        return {uuid for uuid, holder in holders.items() if holder.partition("/")[0] == pod.name}

    def _gpus_of(self, pod: PodSpec) -> str:
        """`GPUs 0-3 on NUMA node 0`."""
        uuids = self._uuids_of(pod)
        indices = sorted(self._stage.machine.uuids.index(uuid) for uuid in uuids)
        nodes = sorted({node for index in indices if (node := self._numa(index)) is not None})
        where = f" on NUMA {_plural('node', nodes)} {_ranges(nodes)}" if nodes else ""
        return f"{_plural('GPU', indices)} {_ranges(indices)}{where}"

    def _numa(self, index: int) -> int | None:
        machine = self._stage.machine
        return self._stage.profile.places[machine.slot(machine.uuids[index])].numa_node

    def _show_gpus(self, only: set[str] | None = None) -> None:
        machine, holders = self._stage.machine, self._stage.holders()
        rows = []
        for index, uuid in enumerate(machine.uuids):
            if only is not None and uuid not in only:
                continue
            numa = self._numa(index)
            rows.append(
                (
                    str(index),
                    uuid,
                    f"{machine.gpu(uuid).memory_total // MIB} MiB",
                    "-" if numa is None else str(numa),
                    "Unhealthy" if uuid in self._bad else "Healthy",
                    holders.get(uuid, "free"),
                )
            )
        self._screen.table(("GPU", "UUID", "MEMORY", "NUMA", "HEALTH", "HELD BY"), rows)


def _amount(pod: PodSpec) -> str:
    parts = [container.limits[GPU] for container in pod.containers]
    text = " + ".join(map(str, parts))
    return f"{text} GPU" if parts == [1] else f"{text} GPUs"


def _plural(word: str, things: list[int]) -> str:
    return word if len(things) == 1 else f"{word}s"


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
