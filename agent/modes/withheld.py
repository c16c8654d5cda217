"""GPUs that are offered in no mode because somebody is on them whom the record does not explain: pure."""

from collections.abc import Mapping
from dataclasses import replace

from agent.holdings.holdings import strangers_by_gpu
from agent.model.gpu import Gpu
from agent.model.holding import Record
from agent.model.modes import GpuMode, Mode, Offering

Withheld = Mapping[str, str]  # why, by UUID


def held_by_strangers(pods: Record, gpus: Mapping[str, Gpu]) -> Withheld:
    """GPUs of which a pod holds something by a device ID that this agent cannot read."""
    found = strangers_by_gpu(pods, {gpu.index: uuid for uuid, gpu in gpus.items()})
    return {
        uuid: f"{holding.namespace}/{holding.pod} holds it as {text} of {holding.resource}, which is no "
        "device ID of this agent: another device plugin handed it out; it is offered when that pod has ended"
        for uuid, (holding, text) in found.items()
    }


def without(targets: Mapping[str, GpuMode], withheld: Withheld) -> Mapping[str, GpuMode]:
    """The targets, with withheld GPUs off."""
    return {
        uuid: closed(target, withheld[uuid]) if uuid in withheld and target.mode is not Mode.OFF else target
        for uuid, target in targets.items()
    }


def closed(target: GpuMode, reason: str) -> GpuMode:
    """A target that takes nobody any more. A device of DRA stays one: its taint keeps claims away."""
    if target.dra:
        return replace(target, offering=Offering.CLOSED, reason=reason)
    return GpuMode(reason=reason, refused=True)
