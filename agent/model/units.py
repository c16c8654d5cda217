"""Units that a device ID can stand for, pairs of resources whose units lie on one GPU, and quantities."""

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

# Quantities of Kubernetes.

# The API server gives quantities back in the form that their author chose, brought to few digits.
_QUANTITY = re.compile(
    r"\+?([0-9]{1,18}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:[eE]([+-]?[0-9]{1,2})|([mkMGTPE]|[KMGTPE]i)?)"
)
_SUFFIXES = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}


def units(quantity: str) -> int:
    """A Kubernetes quantity of an extended resource: whole, in any form. Raises ValueError."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, exponent, suffix = found.groups()
    if not exponent and not suffix and number.isdigit():  # as nearly all are written
        return int(number)
    count = Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])
    if count.denominator != 1:
        raise ValueError(f"{quantity!r} is not a whole number of units")
    return int(count)


# Units that a device ID can stand for, and pairs of resources whose units lie on one GPU.


class UnitKind(Enum):
    WHOLE = "whole"
    REPLICA = "replica"  # a time slice of a whole GPU
    CORE = "core"  # 1 % of a GPU
    MEMORY = "memory"  # a block of its memory
    INSTANCE = "instance"  # a part of a GPU in MIG mode


@dataclass(frozen=True, slots=True, eq=False)  # each is one of its kind
class Unit:
    """One kind of device; `mark` stands in the device ID before the number."""

    mark: str
    kind: UnitKind


WHOLE = Unit("", UnitKind.WHOLE)
REPLICA = Unit("r", UnitKind.REPLICA)
INSTANCE = Unit("", UnitKind.INSTANCE)  # its ID is the instance's own UUID


@dataclass(frozen=True, slots=True)
class ResourcePair:
    name: str  # as people say it
    core: str
    memory: str
    core_unit: Unit
    memory_unit: Unit
    block_bytes: int  # of one unit of memory
    reserved_bytes: int = 0  # of each GPU, never handed out
    whole_gpus: bool = False  # whether 100, 200, ... cores stand for whole GPUs
    memory_alone: bool = False  # whether memory may be asked for without cores

    def blocks(self, memory_bytes: int) -> int:
        """Units of memory that a GPU of that size has."""
        return max(0, (memory_bytes - self.reserved_bytes) // self.block_bytes)
