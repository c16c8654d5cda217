"""Machines as their owners describe them in public: `nvidia-smi`, `nvidia-smi topo -m`, lspci and NCCL
topology dumps of the named systems. Made up where no public figure was found: the addresses of the
DGX-2's NVSwitches and of the PCIe and L40S servers' GPUs.
"""

from typing import Final

from agent.nvml.port import PcieLevel
from agent.simulator.profile import Model, Profile, mesh, places, switched

_H200 = Model(
    product="NVIDIA H200",
    memory_mib=143771,
    reserved_mib=611,
    compute_capability=(9, 0),
    architecture=9,
    pci_device_id=0x233510DE,
    pci_subsystem_id=0x18BE10DE,
    power_limit_w=700,
    idle_w=76,
    max_clocks_mhz=(1980, 1980, 3201, 1545),
    mig_capable=True,
    nvlink_version=6,
)
_A100 = Model(
    product="NVIDIA A100-SXM4-40GB",
    memory_mib=40960,
    reserved_mib=614,
    compute_capability=(8, 0),
    architecture=7,
    pci_device_id=0x20B010DE,
    pci_subsystem_id=0x134F10DE,
    power_limit_w=400,
    idle_w=52,
    max_clocks_mhz=(1410, 1410, 1215, 1290),
    mig_capable=True,
    nvlink_version=5,
)
_V100_SXM2 = Model(
    product="Tesla V100-SXM2-32GB",
    memory_mib=32768,
    reserved_mib=264,
    compute_capability=(7, 0),
    architecture=5,
    pci_device_id=0x1DB510DE,
    pci_subsystem_id=0x124910DE,
    power_limit_w=300,
    idle_w=42,
    max_clocks_mhz=(1530, 1530, 877, 1372),
    nvlink_version=2,
)
_V100_SXM3 = Model(
    product="Tesla V100-SXM3-32GB",
    memory_mib=32768,
    reserved_mib=264,
    compute_capability=(7, 0),
    architecture=5,
    pci_device_id=0x1DB810DE,
    pci_subsystem_id=0x12AB10DE,
    power_limit_w=350,
    idle_w=49,
    max_clocks_mhz=(1597, 1597, 958, 1432),
    nvlink_version=2,
)
_T4 = Model(
    product="Tesla T4",
    memory_mib=15360,
    reserved_mib=450,
    compute_capability=(7, 5),
    architecture=6,
    pci_device_id=0x1EB810DE,
    pci_subsystem_id=0x12A210DE,
    power_limit_w=70,
    idle_w=10,
    max_clocks_mhz=(1590, 1590, 5001, 1470),
)
_L40S = Model(
    product="NVIDIA L40S",
    memory_mib=46068,
    reserved_mib=591,
    compute_capability=(8, 9),
    architecture=8,
    pci_device_id=0x26B910DE,
    pci_subsystem_id=0x185110DE,
    power_limit_w=350,
    idle_w=34,
    max_clocks_mhz=(2520, 2520, 9001, 1965),
)
_A10 = Model(
    product="NVIDIA A10",
    memory_mib=23028,
    reserved_mib=507,
    compute_capability=(8, 6),
    architecture=7,
    pci_device_id=0x223610DE,
    pci_subsystem_id=0x148210DE,
    power_limit_w=150,
    idle_w=16,
    max_clocks_mhz=(1695, 1695, 6251, 1500),
)

_MACHINES = (
    Profile(
        name="dgx-h200",
        title="DGX H200, 8 x 141 GB, NVSwitch",
        driver_version="580.95.05",
        cuda_version=(13, 0),
        model=_H200,
        places=places("1b 43 52 61 9d c3 d1 df", (0, "0-55,112-167"), (1, "56-111,168-223")),
        groups=((PcieLevel.NUMA_NODE, 4),),
        # Third-generation NVSwitch: 18 links of every GPU over four switches.
        links=switched((8, {"0000:05:00.0": 5, "0000:06:00.0": 4, "0000:07:00.0": 4, "0000:08:00.0": 5})),
    ),
    Profile(
        name="dgx-a100",
        title="DGX A100, 8 x 40 GB, NVSwitch",
        driver_version="550.163.01",
        cuda_version=(12, 4),
        model=_A100,
        # Four NUMA nodes per socket, and the GPUs of a pair far from the order that one would guess.
        places=places(
            "07 0f 47 4e 87 90 b7 bd",
            (3, "48-63,176-191"),
            (1, "16-31,144-159"),
            (7, "112-127,240-255"),
            (5, "80-95,208-223"),
        ),
        groups=((PcieLevel.MULTIPLE_SWITCHES, 2),),
        links=switched((8, {f"0000:{bus}:00.0": 2 for bus in ("c4", "c5", "c6", "c7", "c8", "c9")})),
    ),
    Profile(
        name="dgx1-v100",
        title="DGX-1, 8 x V100 32 GB, hybrid cube mesh",
        driver_version="535.216.01",
        cuda_version=(12, 2),
        model=_V100_SXM2,
        places=places("06 07 0a 0b 85 86 89 8a", (0, "0-19,40-59"), (1, "20-39,60-79")),
        groups=((PcieLevel.SINGLE_SWITCH, 2), (PcieLevel.HOST_BRIDGE, 4)),
        links=mesh(
            "0 1 1 2 2 0 0 0",
            "1 0 2 1 0 2 0 0",
            "1 2 0 2 0 0 1 0",
            "2 1 2 0 0 0 0 1",
            "2 0 0 0 0 1 1 2",
            "0 2 0 0 1 0 2 1",
            "0 0 1 0 1 2 0 2",
            "0 0 0 1 2 1 2 0",
        ),
    ),
    Profile(
        name="hgx-16",
        title="HGX-2, 16 x V100 32 GB, NVSwitch on two base boards",
        driver_version="535.216.01",
        cuda_version=(12, 2),
        model=_V100_SXM3,
        places=places(
            "34 36 39 3b 57 59 5c 5e b7 b9 bc be e0 e2 e5 e7", (0, "0-23,48-71"), (1, "24-47,72-95")
        ),
        groups=((PcieLevel.SINGLE_SWITCH, 2), (PcieLevel.MULTIPLE_SWITCHES, 4), (PcieLevel.NUMA_NODE, 8)),
        # Six switches per base board, joined board to board: GPUs of different boards share no switch
        # and are still fully connected (`nvidia-smi topo -m` says NV6 everywhere).
        links=switched(
            (8, {f"0000:{bus}:00.0": 1 for bus in ("6e", "6f", "70", "71", "72", "73")}),
            (8, {f"0000:{bus}:00.0": 1 for bus in ("f1", "f2", "f3", "f4", "f5", "f6")}),
        ),
    ),
    Profile(
        name="pcie-8",
        title="8 x A10 on PCIe switches, two sockets",
        driver_version="570.133.20",
        cuda_version=(12, 8),
        model=_A10,
        places=places("1a 1b 3d 3e 88 89 b1 b2", (0, "0-13,28-41"), (1, "14-27,42-55")),
        groups=((PcieLevel.SINGLE_SWITCH, 2), (PcieLevel.MULTIPLE_SWITCHES, 4)),
    ),
    Profile(
        name="t4-4",
        title="4 x T4, cloud machine of one socket",
        driver_version="535.54.03",
        cuda_version=(12, 2),
        model=_T4,
        places=places("00:1b 00:1c 00:1d 00:1e", (None, "0-47")),  # virtual machines name no node
        groups=((PcieLevel.HOST_BRIDGE, 4),),
    ),
    Profile(
        name="l40s-2",
        title="2 x L40S, one per socket, no NVLink",
        driver_version="550.127.05",
        cuda_version=(12, 4),
        model=_L40S,
        places=places("41 c1", (0, "0-95,192-287"), (1, "96-191,288-383")),
    ),
)

PROFILES: Final = {machine.name: machine for machine in _MACHINES}


def profile_named(name: str) -> Profile:
    """The profile of that name. Raises ValueError with the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"no machine profile {name!r}; there are: {', '.join(PROFILES)}") from None
