"""A physical GPU, as the rest of the agent sees it: plain frozen values, no library types."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Driver:
    version: str  # "580.95.05"
    nvml_version: str  # "13.580.95.05"
    cuda_version: tuple[int, int]  # the newest CUDA that the driver serves, (13, 0)


@dataclass(frozen=True, slots=True)
class Instance:
    """A part of a GPU in MIG mode that containers can have."""

    uuid: str  # "MIG-5fd4f087-..."
    gpu_instance: int  # numbers of the driver, by which its events name the instance
    compute_instance: int
    profile: str  # as NVIDIA writes it: "1g.18gb", "1c.3g.71gb", "1g.18gb+me"
    memory_bytes: int
    multiprocessors: int = 0  # 0: not known
    slices: int = 0  # of its GPU instance and of itself
    compute_slices: int = 0
    engines: tuple[int, ...] = ()  # copy, decoder, encoder, JPEG, optical flow


@dataclass(frozen=True, slots=True)
class Gpu:
    """Identity and fixed traits of one GPU. The UUID is the key; index and minor number may change."""

    uuid: str  # "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
    index: int  # NVML's enumeration index
    minor: int  # N of /dev/nvidiaN
    pci_bus_id: str  # "0000:1b:00.0", lower case as in sysfs
    product: str  # "NVIDIA H200"
    memory_bytes: int
    compute_capability: tuple[int, int]  # (9, 0)
    mig_enabled: bool = False
    numa_node: int | None = None  # None: the machine names none
    instances: tuple[Instance, ...] = ()  # in MIG mode, in the driver's order
    # How the driver switches its MIG mode: "live", or by a "reset" of the GPU; empty: it has none.
    mig_switch: str = ""


def normalise_bus_id(text: str) -> str:
    """NVML's `00000000:1B:00.0` as sysfs writes it, `0000:1b:00.0` (the domain has at least four digits)."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
