"""Device IDs: each names its GPU and its unit, and is unique across all resources of the node.

`<uuid>` a whole GPU, `<uuid>::c17` a vGPU core, `::m42` a vGPU memory block, `::sc17` and `::sm3` an
MPS core and memory unit, `::r3` a time-slicing replica; an instance of a GPU in MIG mode has its own
UUID, `MIG-...`. Exporters that cut at `::` attribute all of them to their GPU. At most 63 characters,
the limit that the device plugin API documents.
"""

from dataclasses import dataclass

from agent.model.modes import UNITS
from agent.model.units import INSTANCE, WHOLE, Unit

LONGEST = 63
SEPARATOR = "::"
INSTANCE_PREFIX = "MIG-"
PREFIXES = ("GPU-", INSTANCE_PREFIX)  # one of them begins every device ID of this agent


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A device ID taken apart; `number` counts from 0 and is 0 for a whole GPU."""

    gpu: str  # of an instance its own UUID: its GPU is in the inventory
    unit: Unit
    number: int = 0

    def __str__(self) -> str:
        return self.gpu if not self.unit.mark else f"{self.gpu}{SEPARATOR}{self.unit.mark}{self.number}"


class BadDeviceId(ValueError):
    """Text that no resource of this agent uses as a device ID."""


_NUMBERED = {mark: unit for mark, unit in UNITS.items() if mark}


def parse(text: str) -> DeviceId:
    """Take a device ID apart. Raises BadDeviceId with the reason."""
    gpu, separator, tail = text.partition(SEPARATOR)
    if not gpu or len(text) > LONGEST:
        raise BadDeviceId(f"device ID {text[:80]!r} is empty or longer than {LONGEST} characters")
    if not separator:
        return DeviceId(gpu, INSTANCE if gpu.startswith(INSTANCE_PREFIX) else WHOLE)
    mark = tail.rstrip("0123456789")
    digits = tail[len(mark) :]
    if mark not in _NUMBERED or not digits or (digits != "0" and digits.startswith("0")):
        raise BadDeviceId(f"device ID {text!r} does not end in a unit that this agent offers")
    return DeviceId(gpu, _NUMBERED[mark], int(digits))
