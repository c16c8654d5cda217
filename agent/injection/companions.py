"""Companions of GPUs, which every container with one gets as configured: GDS, GDRCopy, MOFED, IMEX channels.

Which nodes and mounts each of them needs is NVIDIA's to know: its generator has a mode for each. Here is what
a node must have for it: one that lacks it offers no GPU, rather than start containers without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agent.settings import Injection

GPU_NODE = "dev/nvidiactl"


@dataclass(frozen=True, slots=True)
class Companion:
    key: str  # of the configuration, below `injection`
    mode: str  # of `nvidia-ctk cdi generate`
    nodes: tuple[str, ...]  # below a device root; a pattern each
    devices: tuple[str, ...]  # of the generated specification
    variables: Mapping[str, str]  # by which NVIDIA's runtime gives it to a container
    comes_with: str


def wanted(injection: Injection) -> tuple[Companion, ...]:
    """Those that are switched on."""
    switches = ((injection.gds, _GDS), (injection.gdrcopy, _GDRCOPY), (injection.mofed, _MOFED))
    found = [companion for on, companion in switches if on]
    if channels := injection.imex_channels:
        names = tuple(str(each) for each in channels)
        found.append(
            Companion(
                "imexChannels",
                "imex",
                tuple(f"dev/nvidia-caps-imex-channels/channel{name}" for name in names),
                names,
                {"NVIDIA_IMEX_CHANNELS": ",".join(names)},
                "the driver, on nodes with an IMEX domain (nvidia-modprobe -c 0, or "
                "NVreg_CreateImexChannel0=1 of the module nvidia)",
            )
        )
    return tuple(found)


def device_root(driver_root: Path) -> Path:
    """Where device nodes are, as seen from here: a driver root may hold files only. Blocks."""
    return driver_root if (driver_root / GPU_NODE).exists() else Path("/")


def nodes(root: Path, companions: Sequence[Companion]) -> tuple[str, ...]:
    """The device nodes that are there, as paths below the root. Blocks."""
    patterns = [pattern for each in companions for pattern in each.nodes]
    return tuple(str(path.relative_to(root)) for pattern in patterns for path in sorted(root.glob(pattern)))


def lacking(root: Path, companions: Sequence[Companion]) -> str:
    """Those that the node lacks, in words with the remedy; empty: none. Blocks."""
    return "; ".join(
        f"injection.{each.key} is on, and this node has no /{missing}, which comes with {each.comes_with}: "
        "load it and start the agent again, or leave it off for this node's pool"
        for each in companions
        if (missing := next((one for one in each.nodes if not any(root.glob(one))), None))
    )


_GDS = Companion(
    "gds",
    "gds",
    ("dev/nvidia-fs*",),
    ("all",),
    MappingProxyType({"NVIDIA_GDS": "enabled"}),
    "NVIDIA's kernel module nvidia-fs",
)
_GDRCOPY = Companion(
    "gdrcopy",
    "gdrcopy",
    ("dev/gdrdrv",),
    ("all",),
    MappingProxyType({"NVIDIA_GDRCOPY": "enabled"}),
    "NVIDIA's kernel module gdrdrv",
)
_MOFED = Companion(
    "mofed",
    "mofed",
    ("dev/infiniband/rdma_cm", "dev/infiniband/uverbs*"),
    ("all",),
    MappingProxyType({"NVIDIA_MOFED": "enabled"}),
    "the drivers of the network adapters (rdma_ucm, ib_uverbs)",
)
