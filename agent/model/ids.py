"""Device IDs: each names its GPU and its unit, and is unique across all resources of the node.

`<uuid>` a whole GPU, `<uuid>::c17` a vGPU core, `::m42` a vGPU memory block, `::sc17` and `::sm3` an
MPS core and memory unit, `::r3` a time-slicing replica. Exporters that cut at `::` attribute all of
them to their GPU. At most 63 characters, the limit that the device plugin API documents.
"""

from dataclasses import dataclass
from enum import Enum

from agent.model.modes import Mode

LONGEST = 63
SEPARATOR = "::"


class Unit(Enum):
    """What one device ID stands for; the value is its mark in the ID."""

    WHOLE = ""
    VGPU_CORE = "c"  # 1 % of a GPU
    VGPU_MEMORY = "m"  # 256 MiB
    MPS_CORE = "sc"  # 1 % of a GPU
    MPS_MEMORY = "sm"  # 1 GiB
    REPLICA = "r"  # a time slice of a whole GPU

    @property
    def mode(self) -> Mode:
        """The mode of the GPUs that have such units."""
        if self in (Unit.VGPU_CORE, Unit.VGPU_MEMORY):
            return Mode.VGPU
        return Mode.MPS if self in (Unit.MPS_CORE, Unit.MPS_MEMORY) else Mode.PGPU


@dataclass(frozen=True, slots=True)
class DeviceId:
    """A device ID taken apart; `number` counts from 0 and is 0 for a whole GPU."""

    gpu: str
    unit: Unit
    number: int = 0

    def __str__(self) -> str:
        return self.gpu if self.unit is Unit.WHOLE else f"{self.gpu}{SEPARATOR}{self.unit.value}{self.number}"


class BadDeviceId(ValueError):
    """Text that no resource of this agent uses as a device ID."""


_UNITS = {unit.value: unit for unit in Unit if unit is not Unit.WHOLE}


def parse(text: str) -> DeviceId:
    """Take a device ID apart. Raises BadDeviceId with the reason."""
    gpu, separator, tail = text.partition(SEPARATOR)
    if not gpu or len(text) > LONGEST:
        raise BadDeviceId(f"device ID {text[:80]!r} is empty or longer than {LONGEST} characters")
    if not separator:
        return DeviceId(gpu, Unit.WHOLE)
    mark = tail.rstrip("0123456789")
    digits = tail[len(mark) :]
    if mark not in _UNITS or not digits or (digits != "0" and digits.startswith("0")):
        raise BadDeviceId(f"device ID {text!r} does not end in a unit that this agent sells")
    return DeviceId(gpu, _UNITS[mark], int(digits))
