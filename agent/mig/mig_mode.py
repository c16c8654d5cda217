"""Switches MIG mode of GPUs for layouts, where the driver resets nothing or a reset is allowed."""

from contextlib import suppress

import structlog

from agent.mig.made import MadeBook
from agent.model.gpu import Gpu
from agent.model.node_layout import resolve
from agent.modes.wing import Node, NotYet, SetUpFailed
from agent.nvml.nvml_errors import NvmlCode, NvmlError

log = structlog.get_logger()

SWITCH_SECONDS = 60.0  # with the reset of a GPU


class MigSwitch:
    def __init__(self, node: Node, book: MadeBook) -> None:
        self._node = node
        self._book = book

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
        if obstacle := self.obstacle(self._now(gpu)):
            raise SetUpFailed(obstacle)
        try:
            await self._book.note_switch(gpu.uuid, on=True)
            await self._set(gpu, on=True)
        except OSError as error:
            raise NotYet(f"MIG mode is not turned on, since that cannot be written down: {error}") from error
        except NvmlError as error:
            if error.code == NvmlCode.IN_USE:
                text = f"MIG mode cannot be turned on while something uses the GPU ({error}): end it"
                raise NotYet(text) from error
            raise SetUpFailed(f"MIG mode cannot be turned on: {error}") from error

    async def turn_off(self, gpu: Gpu) -> None:
        """Where this agent turned it on and nobody's instance is left; never fails."""
        if gpu.uuid not in self._book.switched or not self._node.settings.mig.manage:
            return
        reset = self._now(gpu).mig_switch == "reset"
        if reset and not self._node.settings.mig.allow_reset:
            return
        with suppress(NvmlError, OSError):
            await self._clear(gpu.uuid)
            await self._set(gpu, on=False)
            await self._book.note_switch(gpu.uuid, on=False)

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
