"""The wing of MIG: instances that are there are offered, live, and made and destroyed as layouts say."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import anyio

from agent.injection.inject import makes_no_instance
from agent.inventory.snapshot import GpuState
from agent.kubelet.wire import ResourcePlugin
from agent.mig.layouts import Layouts
from agent.mig.made import MadeBook
from agent.mig.mig_mode import MigSwitch
from agent.mig.plugin import MigPlugin, resource_of
from agent.model.gpu import Gpu
from agent.model.look import Look
from agent.model.modes import Mode
from agent.modes.wing import Document, Machine, Node, Task, Wing
from agent.nvml.port import NvmlError
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.series import Series

MEASURE_SECONDS = 10.0
WHOLE_RESOURCE = Mode.PGPU.resources[0]  # by which strategy single offers them


class MigWing(Wing):
    mode: ClassVar[Mode] = Mode.MIG
    prepares: ClassVar[bool] = True  # its MIG mode is turned on, where the agent may do that

    def __init__(self, node: Node) -> None:
        """See `build`."""
        self._node = node
        self._single = node.settings.mig.strategy == "single"
        self._plugins: dict[str, MigPlugin] = {}
        self._used: Mapping[str, int] = {}  # bytes in use, by instance
        self._book = MadeBook(Path(node.settings.host.state))
        self._layouts = Layouts(node, self._book, lambda: tuple(self._plugins.values()))
        self._switch = MigSwitch(node, self._book)

    @classmethod
    def checks(cls, settings: Settings, machine: Machine) -> Iterator[Look]:
        for gpu in machine.gpus:
            if gpu.mig_enabled and not settings.modes.mig:
                text = (
                    f"on for GPU {gpu.index}, which is not offered: set modes.mig: true, or nvidia-smi -mig 0"
                )
                yield Look.warning("MIG", text)
            elif gpu.mig_enabled:
                yield Look.warning("MIG", text) if (text := _lacking(gpu)) else Look.ok("MIG", _listed(gpu))
        managing = settings.modes.mig and settings.mig.manage
        able = managing and any(gpu.mig_enabled or gpu.mig_switch for gpu in machine.gpus)
        if able and (text := makes_no_instance(machine.driver, machine.root)):
            yield Look.warning("MIG layouts", text)

    @classmethod
    async def build(cls, node: Node) -> Self:
        self = cls(node)
        if node.settings.mig.manage:
            await self._book.load()
            self._layouts.restore()
        else:
            await self._book.discard()
        return self

    def plugins(self) -> Sequence[ResourcePlugin]:
        """One for each profile that was ever seen; with strategy single one for all."""
        named = {
            each.profile
            for state in self._node.snapshot.value.gpus
            for each in state.gpu.instances
            if each.profile
        }
        for resource in [WHOLE_RESOURCE] if self._single else sorted(map(resource_of, named)):
            if resource not in self._plugins:
                node = self._node
                parts = (node.snapshot, node.assignment, node.holdings, node.injector)
                of_all = self._of_layouts if self._single else None
                self._plugins[resource] = MigPlugin(
                    resource, *parts, of_all=of_all, leaving=self._layouts.leaving
                )
        return tuple(self._plugins.values())

    def tasks(self) -> Sequence[Task]:
        tasks = [Task("mig memory", self._measure)]
        if self._node.settings.mig.manage:
            tasks += [Task("mig layouts", self._layouts.run), Task("mig mode", self._switch.run)]
        return tasks

    def obstacle(self, state: GpuState) -> str:
        gpu = state.gpu
        if not gpu.mig_enabled:
            return self._switch.obstacle(gpu)
        profiles = {each.profile for one in self._node.snapshot.value.gpus for each in one.gpu.instances}
        # A layout has one profile; on the way there others are not offered.
        if self._single and len(profiles) > 1 and not self._of_layouts():
            return (
                "with mig.strategy single all instances have one profile, and here are "
                f"{', '.join(sorted(profiles))}: make them alike, or set mig.strategy: mixed"
            )
        return ""

    def _of_layouts(self) -> frozenset[str]:
        """The profiles of layouts, asked for or else in force."""
        asked = {name for entry in self._node.desired.cell.value.entries for name in entry.instances}
        in_force = {name for mode in self._node.assignment.value.gpus.values() for name in mode.instances}
        return frozenset(asked or in_force)

    def undoes(self, state: GpuState) -> str:
        """See the interface: MIG mode that a layout had turned on."""
        return self._switch.undoes(state.gpu)

    async def prepare(self, gpu: Gpu) -> None:
        """See the interface: its MIG mode is turned on."""
        await self._switch.turn_on(gpu)

    async def give_back(self, gpu: Gpu) -> None:
        """See the interface: MIG mode that was turned on for a layout is turned off again."""
        await self._switch.turn_off(gpu)

    def gpu_facts(self, uuid: str) -> Document:
        state = self._node.snapshot.value.by_uuid.get(uuid)
        if state is None or not state.gpu.mig_enabled:
            return {}
        layout = self._layouts.of(uuid)
        way = {"wanted": layout.wanted, "steps": layout.steps, "problem": layout.problem} if layout else None
        return {
            "layout": way,
            "instances": [
                {
                    "uuid": each.uuid,
                    "profile": each.profile,
                    "memoryBytes": each.memory_bytes,
                    "memoryUsedBytes": self._used.get(each.uuid),
                    "cause": state.trouble_of(each.uuid),
                    "leaving": self._layouts.leaving.get(each.uuid, ""),
                    "made": "agent" if self._layouts.made_here(uuid, each.uuid) else "others",
                }
                for each in state.gpu.instances
            ],
        }

    def remarks(self) -> Sequence[str]:
        found = []
        for gpu in self._offered():
            layout = self._layouts.of(gpu.uuid)
            if layout and layout.problem:
                found.append(f"GPU {gpu.index} has not the instances of its layout: {layout.problem}")
            elif text := "" if gpu.mig_enabled and layout and layout.steps else _lacking(gpu):
                found.append(text)
        return found

    def metrics(self) -> Iterator[Series]:
        for (action, result), count in self._layouts.changes.items():
            yield d.INSTANCE_CHANGES, count, (action, result)
        for gpu in self._offered():
            if layout := self._layouts.of(gpu.uuid):
                yield d.INSTANCE_STEPS, len(layout.steps), (gpu.uuid, str(gpu.index))
            state = self._node.snapshot.value.by_uuid[gpu.uuid]
            for each in gpu.instances:
                labels = (gpu.uuid, str(gpu.index), each.uuid, each.profile)
                yield (
                    d.INSTANCE_HEALTHY,
                    float(not (state.trouble_of(each.uuid) or each.uuid in self._layouts.leaving)),
                    labels,
                )
                yield d.INSTANCE_MEMORY_TOTAL, each.memory_bytes, labels
                if each.uuid in self._used:
                    yield d.INSTANCE_MEMORY_USED, self._used[each.uuid], labels

    def _offered(self) -> list[Gpu]:
        assignment = self._node.assignment.value
        gpus = [state.gpu for state in self._node.snapshot.value.gpus]
        return [gpu for gpu in gpus if assignment.of(gpu.uuid).mode is self.mode]

    async def _measure(self) -> None:
        while True:
            used: dict[str, int] = {}
            for uuid, instance in [(gpu.uuid, of.uuid) for gpu in self._offered() for of in gpu.instances]:
                about = partial(str, uuid)  # instances that hang are no more than the one GPU that does
                try:
                    used[instance] = await self._node.calls.run(
                        self._node.nvml.instance_memory, instance, about=about
                    )
                except NvmlError:  # NVML is closed, or it is gone: missing rather than wrong
                    continue
            self._used = used
            await anyio.sleep(MEASURE_SECONDS)


def _lacking(gpu: Gpu) -> str:
    """Say which part of a GPU nobody can ask for; empty: there is none."""
    if not gpu.mig_enabled:
        return f"GPU {gpu.index} has left MIG mode, so that nothing of it is offered"
    if not gpu.instances:
        return (
            f"GPU {gpu.index} is in MIG mode and has no instance, so that nothing of it is offered; "
            f"nvidia-smi mig -i {gpu.index} -cgi PROFILE -C makes one, -lgip lists profiles"
        )
    unnamed = [each.uuid for each in gpu.instances if not each.profile]
    return f"the driver names no profile of {', '.join(unnamed)}: not offered" if unnamed else ""


def _listed(gpu: Gpu) -> str:
    return f"on for GPU {gpu.index}: {', '.join(each.profile for each in gpu.instances)}"
