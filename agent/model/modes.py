"""The modes that GPUs can be offered in, as one table, their units, and the device IDs of these.

A new mode is a row here and a wing, a folder with `plugin.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, Self

from agent.model.cuda import client_ceiling
from agent.model.gpu import Driver, Gpu

# Units that a device ID can stand for, pairs of resources whose units lie on one GPU, and quantities.

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


# The modes that GPUs can be offered in, as one table, and the device IDs of their units.

# The table of modes, one row each, and which GPU is offered in which.


@dataclass(frozen=True, slots=True)
class ModeRow:
    # Resources of their own kind; those of a pair follow from it.
    single: tuple[str, ...] = ()
    single_units: tuple[Unit, ...] = ()  # what their device IDs stand for
    prefix: str = ""  # begins the names of resources of which the GPUs say how many there are
    partitioned: bool = False  # whether it is for GPUs in MIG mode, and for these alone
    pair: ResourcePair | None = None
    slices: bool = False  # whether a layout may cut its GPUs into time slices
    # Whether something has to run on a GPU before it is offered, and is torn down afterwards.
    needs_daemon: bool = False
    # How many containers a GPU serves at once, where a server does the work of all; None: there is no server.
    client_ceiling: Callable[[Gpu, Driver | None], int] | None = None
    resizable: bool = False  # whether running containers may be given more than their pods asked for
    by_claims: bool = False  # whether its GPUs are devices of DRA, until claims choose another one


NOTHING: Final = ModeRow()


class Mode(Enum):
    """How a GPU is offered; a GPU belongs to one mode at a time. The value is the word of the node label."""

    _value_: str
    row: ModeRow

    def __new__(cls, word: str, row: ModeRow = NOTHING) -> Self:
        self = object.__new__(cls)
        self._value_ = word
        self.row = row
        return self

    OFF = "off"  # by nobody
    PGPU = ("pgpu", ModeRow(("nvidia.com/gpu", "nvidia.com/gpu.shared"), (WHOLE, REPLICA), slices=True))
    VGPU = (
        "vgpu",
        ModeRow(
            pair=ResourcePair(
                "vGPU",
                "tencent.com/vcuda-core",
                "tencent.com/vcuda-memory",
                Unit("c", UnitKind.CORE),
                Unit("m", UnitKind.MEMORY),
                block_bytes=256 << 20,
                whole_gpus=True,
                memory_alone=True,
            ),
            resizable=True,
        ),
    )
    MPS = (
        "mps",
        ModeRow(
            pair=ResourcePair(
                "MPS",
                "nvidia.com/mps-core",
                "nvidia.com/mps-memory",
                Unit("sc", UnitKind.CORE),
                Unit("sm", UnitKind.MEMORY),
                block_bytes=1 << 30,
                reserved_bytes=1 << 30,  # for the MPS server itself
            ),
            needs_daemon=True,
            client_ceiling=client_ceiling,
        ),
    )
    DRA = ("dra", ModeRow(by_claims=True))
    MIG = ("mig", ModeRow(single_units=(INSTANCE,), prefix="nvidia.com/mig-", partitioned=True))

    @property
    def resources(self) -> tuple[str, ...]:
        """The extended resources by which pods ask for it."""
        pair = self.row.pair
        return self.row.single + ((pair.core, pair.memory) if pair else ())

    @property
    def units(self) -> tuple[Unit, ...]:
        """The unit of its device IDs."""
        pair = self.row.pair
        return self.row.single_units + ((pair.core_unit, pair.memory_unit) if pair else ())


# By device plugins; claims on a GPU of DRA choose among those in which it can be a device.
OFFERED_MODES = tuple(mode for mode in Mode if mode.resources or mode.row.prefix)
_RESOURCES = frozenset(name for mode in OFFERED_MODES for name in mode.resources)
_PREFIXES = tuple(mode.row.prefix for mode in OFFERED_MODES if mode.row.prefix)


def is_offered(resource: str) -> bool:
    """Whether an extended resource is one of this agent's."""
    return resource in _RESOURCES or resource.startswith(_PREFIXES)


UNCLAIMED: Final = Mode.DRA  # of a GPU that no claim has chosen the mode of yet
WHOLE_GPUS: Final = Mode.PGPU
SHARES: Final = Mode.MPS
PAIRS: Mapping[Mode, ResourcePair] = {mode: mode.row.pair for mode in OFFERED_MODES if mode.row.pair}
MODE_OF_UNIT: Mapping[Unit, Mode] = {unit: mode for mode in OFFERED_MODES for unit in mode.units}
UNITS: Mapping[str, Unit] = {unit.mark: unit for unit in MODE_OF_UNIT}
# The word of a mode, in configuration and annotations.
if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(mode.value for mode in Mode)]

# Words of the node label beside modes and layouts. gpu-manager's nodes carry nvidia-device-enable=enable.
ALIASES = {"enable": Mode.VGPU.value}
# By these another agent claims the node's GPUs.
FOREIGN_VALUES = {"pgpu-dra": "NVIDIA's DRA driver"}
# Value of the label of the mode in force while GPUs differ from it.
SWITCHING = "switching"


class Offering(Enum):
    """How the units of a GPU stand on the lists of its mode."""

    OPEN = "open"
    # Nothing more is offered; free IDs stay listed for a moment, as Unhealthy. One that leaves the list while
    # the kubelet is allocating it crashes kubelet 1.36 (nil dereference in its device manager).
    CLOSING = "closing"
    # IDs that are held stay listed, as Unhealthy, until their holder has ended; free ones have left the list.
    # Of a pair a pod that the kubelet was admitting at that moment still gets what is reserved for it.
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GpuMode:
    """The mode in force on one GPU, or the one that is wanted."""

    mode: Mode = Mode.OFF
    offering: Offering = Offering.OPEN
    reason: str = ""  # why it is not offered, in words; empty when it is
    replicas: int = 1  # pGPU only: time slices
    refused: bool = False  # off, though a mode is wanted: `reason` says what stands in its way
    dra: bool = False  # by claims, and on no list of a device plugin: a GPU is offered by one door
    instances: tuple[str, ...] = ()  # in MIG mode: profiles that it shall have; none: as they are

    @property
    def offered(self) -> bool:
        """Whether device plugins list free units of it."""
        return self.offering is Offering.OPEN and not self.dra

    @property
    def claimable(self) -> bool:
        """Whether claims may be allocated on it."""
        return self.offering is Offering.OPEN and self.dra

    @property
    def list_key(self) -> tuple[Mode, int, bool]:
        """By which one way of offering a GPU differs from another."""
        return (self.mode, self.replicas, self.dra)

    @property
    def plugin_mode(self) -> Mode:
        """On whose lists it stands, if at all."""
        return Mode.OFF if self.dra else self.mode

    @property
    def requested(self) -> Mode:
        """The mode as a label or a layout names it: claims choose another without one."""
        return UNCLAIMED if self.dra else self.mode

    @property
    def leaving(self) -> bool:
        """Whether free IDs stay listed for a moment, though nothing is offered."""
        return self.offering is Offering.CLOSING and not self.dra


OFF = GpuMode(reason="no mode is set for this GPU")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which GPU, by UUID, is offered in which mode. GPUs that are not named are off."""

    gpus: Mapping[str, GpuMode] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, uuid: str) -> GpuMode:
        return self.gpus.get(uuid, OFF)


# Device IDs: each names its GPU and its unit, and is unique across all resources of the node.
#
# `<uuid>` a whole GPU, `<uuid>::c17` a vGPU core, `::m42` a vGPU memory block, `::sc17` and `::sm3` an MPS
# core and memory unit, `::r3` a time-slicing replica; an instance of a GPU in MIG mode has its own UUID,
# `MIG-...`. Exporters that cut at `::` attribute all of them to their GPU. At most 63 characters, the limit
# that the device plugin API documents.

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
