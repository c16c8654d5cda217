"""Units that a device ID can stand for, and pairs of resources whose units lie on one GPU."""

from dataclasses import dataclass
from enum import Enum


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
