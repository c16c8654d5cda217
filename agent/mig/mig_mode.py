"""Switches MIG mode of GPUs for layouts, where the driver resets nothing or a reset is allowed."""

from contextlib import suppress

import anyio
import structlog

from agent.mig.made import MadeBook
from agent.model.gpu import Gpu
from agent.model.modes import Mode
from agent.model.node_inventory import resolve
from agent.modes.wing import Node, NotYet, SetUpFailed
from agent.nvml.nvml_errors import NvmlCode, NvmlError

log = structlog.get_logger()

SWITCH_SECONDS = 60.0  # with the reset of a GPU
SEEN_SECONDS = 5.0


class MigSwitch:
    def __init__(self, node: Node, book: MadeBook) -> None:
        self._node = node
        self._book = book
        self._stays: dict[str, str] = {}  # GPUs whose MIG mode could not be turned off, and why

    def obstacle(self, gpu: Gpu) -> str:
        """Why MIG mode of a GPU is not turned on, in words; empty: it is."""
        by_hand = f"turn it on with nvidia-smi -i {gpu.index} -mig 1, or ask for another mode"
        if not self._node.settings.mig.manage:
            return f"the GPU is not in MIG mode, and the agent does not switch that; {by_hand}"
        if not gpu.mig_switch:
            return f"GPU {gpu.index} ({gpu.product}) has no MIG mode; leave it out, or ask for another mode"
        entries, gpus = (
            self._node.desired.cell.value.entries,
            [one.gpu for one in self._node.snapshot.value.gpus],
        )
        target = resolve(entries, gpus, lenient=True).get(gpu.uuid)
        if target is None or not target.instances:
            return f"the GPU is not in MIG mode, and no layout names instances for it; {by_hand}"
        if gpu.mig_switch == "reset" and not self._node.settings.mig.allow_reset:
            return (
                "the GPU is not in MIG mode, and its driver resets it to switch that; set mig.allowReset: "
                f"true, or {by_hand}"
            )
        return ""

    async def turn_on(self, gpu: Gpu) -> None:
        """Nobody holds anything of it. Raises SetUpFailed."""
        if self._now(gpu).mig_enabled:
            return
        self._stays.pop(gpu.uuid, None)
        if obstacle := self.obstacle(self._now(gpu)):
            raise SetUpFailed(obstacle)
        try:
            await self._book.note_switch(gpu.uuid, on=True)
        except OSError as error:
            raise NotYet(f"MIG mode is not turned on, since that cannot be written down: {error}") from error
        try:
            await self._set(gpu, on=True)
        except NvmlError as error:
            with suppress(OSError):
                await self._book.note_switch(gpu.uuid, on=False)
            if error.code == NvmlCode.IN_USE:
                text = f"MIG mode cannot be turned on while something uses the GPU ({error}): end it"
                raise NotYet(text) from error
            raise SetUpFailed(f"MIG mode cannot be turned on: {error}") from error

    def undoes(self, gpu: Gpu) -> str:
        """Whether MIG mode is turned off once mode mig has left the GPU, in words; empty: it is not."""
        in_force = self._node.assignment.value.of(gpu.uuid).mode is Mode.MIG
        if in_force and gpu.mig_enabled and self._may_turn_off(gpu) and gpu.uuid not in self._stays:
            return "its MIG mode is turned off for another mode"
        return ""

    def _may_turn_off(self, gpu: Gpu) -> bool:
        settings = self._node.settings.mig
        ours = settings.manage and gpu.uuid in self._book.switched
        return ours and (gpu.mig_switch == "live" or settings.allow_reset)

    async def turn_off(self, gpu: Gpu) -> None:
        """Where this agent turned it on and nobody's instance is left; never fails."""
        if not self._may_turn_off(self._now(gpu)):
            return
        try:
            await self._clear(gpu.uuid)
            await self._set(gpu, on=False)
            await self._book.note_switch(gpu.uuid, on=False)
        except (NvmlError, OSError) as error:
            self._stays[gpu.uuid] = str(error)
            log.warning("mig_mode_stays", gpu=gpu.uuid, problem=str(error))
            return
        with anyio.move_on_after(SEEN_SECONDS):
            await self._node.snapshot.wait_for(lambda _: not self._now(gpu).mig_enabled)

    async def _clear(self, uuid: str) -> None:
        """Destroy this agent's instances; those of others stay, and MIG mode with them."""
        nvml, calls = self._node.nvml, self._node.calls
        partition = await calls.run(nvml.partition, uuid, deadline=SWITCH_SECONDS)
        devices = {each.gpu_instance: each.uuid for each in partition.devices}
        for each in partition.instances:
            if self._book.is_ours(uuid, each, devices.get(each.number, "")):
                await calls.run(nvml.destroy_instance, uuid, each.number, deadline=SWITCH_SECONDS)

    async def _set(self, gpu: Gpu, *, on: bool) -> None:
        calls = self._node.calls
        await calls.run(self._node.nvml.set_mig_mode, gpu.uuid, on, deadline=SWITCH_SECONDS)
        log.info("mig_mode_switched", gpu=gpu.uuid, on=on)
        self._node.read_again()

    def _now(self, gpu: Gpu) -> Gpu:
        state = self._node.snapshot.value.by_uuid.get(gpu.uuid)
        return state.gpu if state else gpu
