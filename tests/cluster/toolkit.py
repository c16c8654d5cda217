"""Files of NVIDIA's driver and toolkit on a node, for a simulated machine: device nodes, CDI spec.

Format: CDI specification 0.6 (device kinds, containerEdits), as `nvidia-ctk cdi generate` uses it.
"""

import json
import os
import platform
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.build.libc_images import stub

KIND = "nvidia.com/gpu"
COMMON_NODES = ("nvidiactl", "nvidia-uvm")
MAJOR = 195
"""NVIDIA's own. Nothing answers there on a machine without its driver, so opening a node fails cleanly."""
CONTROL_MINOR = 255
UVM_MINOR = 254


LIBRARIES = f"usr/lib/{platform.machine()}-linux-gnu"
"""Below a driver root, and in the container alike."""


def make_device_nodes(dev_root: Path, minors: Mapping[str, int]) -> None:
    """Make `dev_root/dev/nvidia<minor>` for every GPU (UUID -> minor) and the nodes common to all."""
    folder = dev_root / "dev"
    folder.mkdir(parents=True)
    numbers = {f"nvidia{minor}": minor for minor in minors.values()}
    numbers |= dict(zip(COMMON_NODES, (CONTROL_MINOR, UVM_MINOR), strict=True))
    for name, minor in numbers.items():
        os.mknod(folder / name, mode=stat.S_IFCHR | 0o666, device=os.makedev(MAJOR, minor))


def make_driver_root(root: Path, version: str, nvml: Path, cuda: Path | None = None) -> None:
    """Put the libraries of a driver below `root`, as Debian has them; device nodes are made apart.

    `nvml` is the simulated libnvidia-ml.so.1, `cuda` the CUDA double; None: a stand-in that does nothing.
    NVIDIA's generator finds the rest by the driver's version.
    """
    folder = root / LIBRARIES
    folder.mkdir(parents=True)
    if cuda is None:
        stub(folder, f"libcuda.so.{version}", "libcuda.so.1")
    else:
        shutil.copyfile(cuda, folder / f"libcuda.so.{version}")
    shutil.copyfile(nvml, folder / f"libnvidia-ml.so.{version}")
    for name in ("libcuda.so", "libnvidia-ml.so"):
        (folder / f"{name}.1").symlink_to(f"{name}.{version}")


def write_cdi_spec(cdi_dir: Path, dev_root: Path, minors: Mapping[str, int]) -> Path:
    """Write the toolkit's specification: one device per UUID; the file appears whole."""

    def node(name: str) -> dict[str, str]:
        return {"path": f"/dev/{name}", "hostPath": str(dev_root / "dev" / name)}

    spec = {
        "cdiVersion": "0.6.0",
        "kind": KIND,
        # The toolkit sets this for all its devices, lest NVIDIA's runtime adds what the variable says.
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [node(name) for name in COMMON_NODES],
        },
        "devices": [
            {"name": uuid, "containerEdits": {"deviceNodes": [node(f"nvidia{minor}")]}}
            for uuid, minor in minors.items()
        ],
    }
    path = cdi_dir / "nvidia.json"
    draft = cdi_dir / ".nvidia.draft"
    draft.write_text(json.dumps(spec))
    draft.rename(path)
    return path
