"""The ways in which a GPU can be sold, and which GPU is sold in which."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Mode(Enum):
    """How a GPU is sold; a GPU belongs to one mode at a time."""

    OFF = "off"  # by nobody
    PGPU = "pgpu"
    VGPU = "vgpu"
    MPS = "mps"


# Words of the node label beside modes and layouts. gpu-manager's nodes carry nvidia-device-enable=enable.
ALIASES = {"enable": Mode.VGPU.value}
# By these another agent claims the node's GPUs.
FOREIGN_VALUES = {"pgpu-dra": "NVIDIA's DRA driver"}
# What the label of the mode in force says while GPUs differ from it.
SWITCHING = "switching"


class Sale(Enum):
    """How the units of a GPU stand on the lists of its mode."""

    OPEN = "open"
    # Nothing more is sold; free IDs stay listed for a moment, as Unhealthy. One that leaves the list while
    # the kubelet is allocating it crashes kubelet 1.36 (nil dereference in its device manager).
    CLOSING = "closing"
    # IDs that are held stay listed, as Unhealthy, until their holder has ended; free ones have left the list.
    # A pod that the kubelet was admitting at that moment still gets what it was promised: one more holder.
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GpuMode:
    """The mode in force on one GPU, or the one that is wanted."""

    mode: Mode = Mode.OFF
    sale: Sale = Sale.OPEN
    reason: str = ""  # why it is not sold, in words; empty when it is
    replicas: int = 1  # pGPU only: time slices
    refused: bool = False  # off, though a mode is wanted: `reason` says what stands in its way

    @property
    def selling(self) -> bool:
        """Whether units may be sold."""
        return self.sale is Sale.OPEN

    @property
    def leaving(self) -> bool:
        """Whether free IDs stay listed for a moment, though nothing is sold."""
        return self.sale is Sale.CLOSING


OFF = GpuMode(reason="no mode is set for this GPU")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which GPU, by UUID, is sold in which mode. GPUs that are not named are off."""

    gpus: Mapping[str, GpuMode] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, uuid: str) -> GpuMode:
        """The mode of one GPU."""
        return self.gpus.get(uuid, OFF)

    def sold_as(self, uuid: str, mode: Mode) -> bool:
        """Whether units of a GPU may be sold in `mode` now."""
        found = self.of(uuid)
        return found.mode is mode and found.selling
