"""Switches MIG mode of GPUs for layouts, where the driver resets nothing or a reset is allowed."""

from contextlib import suppress

import anyio
import structlog

from agent.kit.tasks import repeat
from agent.mig.made import MadeBook
from agent.model.gpu import Gpu
from agent.model.modes import Mode
from agent.model.node_inventory import Target, resolve
from agent.modes.wing import Node, NotYet, SetUpFailed
from agent.nvml.port import NvmlCode, NvmlError, NvmlHung, NvmlNotSupported

log = structlog.get_logger()

SWITCH_SECONDS = 60.0  # with the reset of a GPU
SEEN_SECONDS = 5.0
AGAIN_SECONDS = 30.0  # until MIG mode that stayed on is turned off again
HUNG_LOOK_SECONDS = 1.0


class MigSwitch:
    def __init__(self, node: Node, book: MadeBook) -> None:
        self._node = node
        self._book = book
        self._stays: dict[str, tuple[str, float]] = {}  # MIG mode that stays on: why, and until when
        self._switching: set[str] = set()  # by calls that have not come back

    def obstacle(self, gpu: Gpu) -> str:
        """Why MIG mode of a GPU is not turned on, in words; empty: it is."""
        by_hand = f"turn it on with nvidia-smi -i {gpu.index} -mig 1, or ask for another mode"
        if not self._node.settings.mig.manage:
            return f"the GPU is not in MIG mode, and the agent does not switch that; {by_hand}"
        if not gpu.mig_switch:
            return f"GPU {gpu.index} ({gpu.product}) has no MIG mode; leave it out, or ask for another mode"
        target = self._target(gpu)
        if target is None or not target.instances:
            return f"the GPU is not in MIG mode, and no layout names instances for it; {by_hand}"
        if gpu.mig_switch == "reset" and not self._node.settings.mig.allow_reset:
            return (
                "the GPU is not in MIG mode, and its driver resets it to switch that; set mig.allowReset: "
                f"true, or {by_hand}"
            )
        if self._node.assignment.value.of(gpu.uuid).mode is Mode.MIG:
            return "the GPU has left MIG mode; it is turned on again once nobody holds the GPU"
        return ""

    def _target(self, gpu: Gpu) -> Target | None:
        gpus = [one.gpu for one in self._node.snapshot.value.gpus]
        return resolve(self._node.desired.cell.value.entries, gpus, lenient=True).get(gpu.uuid)

    def _asked(self, gpu: Gpu) -> bool:
        """Whether a GPU is wanted in mode mig, or nobody can say."""
        target = self._target(gpu)
        return not self._node.desired.cell.value.entries or (target is not None and target.mode is Mode.MIG)

    async def turn_on(self, gpu: Gpu) -> None:
        """Nobody holds anything of it; nobody gets it before the driver has answered. Raises SetUpFailed."""
        self._stays.pop(gpu.uuid, None)
        async with self._book.turns[gpu.uuid]:
            if self._now(gpu).mig_enabled:
                return
            if obstacle := self.obstacle(self._now(gpu)):
                raise SetUpFailed(obstacle)
            await self._turn_on(gpu)
        await self._seen(gpu, on=True)

    async def _turn_on(self, gpu: Gpu) -> None:
        try:
            await self._book.forget(gpu.uuid)
            await self._book.note_switch(gpu.uuid, on=True)
            await self._set(gpu, on=True)
        except OSError as error:
            raise NotYet(f"MIG mode is not turned on, since that cannot be written down: {error}") from error
        except NvmlHung as error:
            raise NotYet(f"MIG mode is not turned on: {error}") from error
        except NvmlError as error:
            with suppress(OSError):
                await self._book.note_switch(gpu.uuid, on=False)
            if error.code == NvmlCode.IN_USE:
                text = f"MIG mode cannot be turned on while something uses the GPU ({error}): end it"
                raise NotYet(text) from error
            raise SetUpFailed(f"MIG mode cannot be turned on: {error}") from error

    def undoes(self, gpu: Gpu) -> str:
        """Whether MIG mode is turned off once mode mig has left the GPU, in words; empty: it is not."""
        if gpu.mig_enabled and self._may_turn_off(gpu) and gpu.uuid not in self._stays:
            return "its MIG mode is turned off for another mode"
        return ""

    def _may_turn_off(self, gpu: Gpu) -> bool:
        settings = self._node.settings.mig
        ours = settings.manage and gpu.uuid in self._book.switched
        return ours and (gpu.mig_switch == "live" or settings.allow_reset)

    async def turn_off(self, gpu: Gpu) -> None:
        """Where this agent turned it on, nobody's instance is left and no layout asks for it; never fails."""
        await self._answered(gpu)
        before, _ = self._stays.get(gpu.uuid, ("", 0.0))
        try:
            async with self._book.turns[gpu.uuid]:
                if self._asked(gpu) or not self._may_turn_off(self._now(gpu)):
                    return
                await self._clear(gpu.uuid)
                await self._set(gpu, on=False)
                await self._book.forget(gpu.uuid)
                await self._book.note_switch(gpu.uuid, on=False)
                self._stays.pop(gpu.uuid, None)
                await self._seen(gpu, on=False)  # also by who turns it on next
        except (NvmlError, OSError) as error:
            self._stays[gpu.uuid] = (str(error), anyio.current_time() + AGAIN_SECONDS)
            if str(error) != before:
                log.warning("mig_mode_stays", gpu=gpu.uuid, problem=str(error))

    async def run(self) -> None:
        """Turn off what could not be, and what an earlier agent has left so, for ever."""
        await repeat(self._round, self._node.assignment, self._node.snapshot, self._node.desired.cell)

    async def _round(self) -> float | None:
        for uuid in self._book.switched - self._switching if self._node.desired.known.is_set() else ():
            state = self._node.snapshot.value.by_uuid.get(uuid)
            mode = self._node.assignment.value.gpus.get(uuid)
            if state is None or mode is None or self._asked(state.gpu):
                continue
            if not state.gpu.mig_enabled and mode.mode not in (Mode.OFF, Mode.MIG):
                with suppress(OSError):  # others turned it off: what they turn on later is theirs
                    await self._book.note_switch(uuid, on=False)
            _, again = self._stays.get(uuid, ("", 0.0))
            if state.gpu.mig_enabled and mode.mode is Mode.OFF and anyio.current_time() >= again:
                record = await self._node.holdings.refresh()
                parts = {each.uuid for each in state.gpu.instances}
                if record and not any(parts & set(holding.gpus) for holding in record.holdings):
                    await self.turn_off(state.gpu)
        return AGAIN_SECONDS if self._book.switched else None

    async def _clear(self, uuid: str) -> None:
        """Destroy this agent's instances; those of others stay, and MIG mode with them."""
        nvml, calls = self._node.nvml, self._node.calls
        try:
            partition = await calls.run(nvml.partition, uuid, deadline=SWITCH_SECONDS)
        except NvmlNotSupported:
            return  # it is not in MIG mode
        for each in partition.instances:
            device = partition.uuid_of(each)
            if self._book.is_ours(uuid, each, device):
                await calls.run(nvml.destroy_instance, uuid, each, device, deadline=SWITCH_SECONDS)

    def set_mig_mode(self, uuid: str, on: bool) -> None:
        """Switch it. Blocks, and may come back when nobody waits for it any more. Raises NvmlError."""
        self._switching.add(uuid)
        try:
            self._node.nvml.set_mig_mode(uuid, on)
        finally:
            self._switching.discard(uuid)

    async def _answered(self, gpu: Gpu) -> None:
        """Wait until the driver has done what was given up: it would come when others have the GPU."""
        while gpu.uuid in self._switching:
            await anyio.sleep(HUNG_LOOK_SECONDS)

    async def _set(self, gpu: Gpu, *, on: bool) -> None:
        try:
            await self._node.calls.run(self.set_mig_mode, gpu.uuid, on, deadline=SWITCH_SECONDS)
        except NvmlHung:
            if gpu.uuid not in self._switching:
                raise
            await self._answered(gpu)
            await self._set(gpu, on=on)
        else:
            log.info("mig_mode_switched", gpu=gpu.uuid, on=on)
            self._node.read_again()

    async def _seen(self, gpu: Gpu, *, on: bool) -> None:
        """Wait until the inventory shows it, for a while."""
        with anyio.move_on_after(SEEN_SECONDS):
            await self._node.snapshot.wait_for(lambda _: self._now(gpu).mig_enabled is on)

    def _now(self, gpu: Gpu) -> Gpu:
        state = self._node.snapshot.value.by_uuid.get(gpu.uuid)
        return state.gpu if state else gpu
