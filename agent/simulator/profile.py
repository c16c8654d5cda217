"""The parts of a simulated machine: plain values, filled in by `profiles`."""

import uuid
from dataclasses import dataclass

from agent.nvml.port import PcieLevel

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "machines.gpu-node-agent.io")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A GPU product, with NVML's own numbers (device ids as `nvmlPciInfo_t` packs them)."""

    product: str
    memory_mib: int
    reserved_mib: int  # what the driver keeps; nvmlMemory_v2_t separates it from `used`
    compute_capability: tuple[int, int]
    architecture: int  # nvmlDeviceArchitecture_t: 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper
    pci_device_id: int
    pci_subsystem_id: int
    power_limit_w: int
    idle_w: int
    max_clocks_mhz: tuple[int, int, int, int]  # graphics, SM, memory, video
    mig_capable: bool = False
    nvlink_version: int = 0

    @property
    def remaps_rows(self) -> bool:
        """Ampere and later remap rows; earlier ones retire pages."""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a GPU sits: PCI address in sysfs form, NUMA node (None: the machine names none), CPUs."""

    bus_id: str
    numa_node: int | None
    cpu_list: str


@dataclass(frozen=True, slots=True)
class Link:
    """One NVLink: to another GPU of the profile by position, or to an NVSwitch by PCI address."""

    gpu: int | None = None
    switch: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine. `groups` are (level, size): GPUs that share a block of that size are at most this far
    apart, the smallest block first; beyond the last they are a system interconnect apart."""

    name: str
    title: str
    driver_version: str
    cuda_version: tuple[int, int]
    model: Model
    places: tuple[Place, ...]
    groups: tuple[tuple[PcieLevel, int], ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()

    @property
    def nvml_version(self) -> str:
        """NVML's own version: the CUDA major in front of the driver's."""
        return f"{self.cuda_version[0]}.{self.driver_version}"

    def uuid_of(self, index: int, node: str = "") -> str:
        """UUID of a GPU, the same in every run; `node` distinguishes machines of one profile."""
        return (
            f"GPU-{uuid.uuid5(_NAMESPACE, f'{self.name}/{node}/{index}' if node else f'{self.name}/{index}')}"
        )

    def ancestor(self, one: int, other: int) -> PcieLevel:
        """Closest common PCIe ancestor of two GPUs of the profile, by position."""
        if one == other:
            return PcieLevel.INTERNAL
        for level, size in self.groups:
            if one // size == other // size:
                return level
        return PcieLevel.SYSTEM


def mesh(*rows: str) -> tuple[tuple[Link, ...], ...]:
    """Direct NVLinks from a matrix of link counts, one row per GPU, "0" where there is none."""
    counts = [[int(cell) for cell in row.split()] for row in rows]
    return tuple(
        tuple(Link(gpu=peer) for peer, count in enumerate(row) for _ in range(count)) for row in counts
    )


def switched(*planes: tuple[int, dict[str, int]]) -> tuple[tuple[Link, ...], ...]:
    """NVSwitch fabrics: per plane the number of its GPUs, and its switches with the links of each GPU."""
    return tuple(
        tuple(Link(switch=switch) for switch, count in switches.items() for _ in range(count))
        for gpus, switches in planes
        for _ in range(gpus)
    )


def places(bus_ids: str, *nodes: tuple[int | None, str]) -> tuple[Place, ...]:
    """Bus numbers (or `bus:device`) of the GPUs, dealt in equal shares to (NUMA node, CPU list)."""
    addresses = [f"0000:{part}.0" if ":" in part else f"0000:{part}:00.0" for part in bus_ids.split()]
    share = len(addresses) // len(nodes)
    return tuple(Place(address, *nodes[position // share]) for position, address in enumerate(addresses))
