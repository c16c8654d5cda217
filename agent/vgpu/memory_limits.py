"""CDI devices that have the driver itself limit a container's memory: one for each number of vGPU units.

NVIDIA's hook `apply-cuda-memory-limits` reads two variables of the container's OCI configuration, in MiB,
when the container is created, and sets the driver's limits for its cgroup (container toolkit 1.20.1, PR 2075;
without them it does nothing). CDI edits come after the pod's own environment, so that a pod's own values do
not count. The soft limit is set to 0 beside the limit: the hook would make it equal to the limit, and memory
would be reserved. An error of the hook keeps the container from starting.
"""

import json
from pathlib import Path

from agent.injection.specification import VENDOR
from agent.kit import files
from agent.model.demand import VGPU

KIND = f"{VENDOR}/memory"
FILE = "gpu-node-agent-memory.json"
CDI_VERSION = "0.5.0"  # nothing newer is used, and old runtimes refuse newer files
LIMIT, REQUEST = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"
MEBIBYTES = VGPU.block_bytes >> 20


def device(units: int) -> str:
    """The qualified name of the device that limits a container to so many units."""
    return f"{KIND}={units}"


def write(folder: Path, most_units: int) -> None:
    """Put the file in place in one step, with devices of 1 to `most_units`. Blocks. Raises OSError."""
    devices = [
        {"name": f"{units}", "containerEdits": {"env": [f"{LIMIT}={units * MEBIBYTES}", f"{REQUEST}=0"]}}
        for units in range(1, most_units + 1)
    ]
    content = {"cdiVersion": CDI_VERSION, "kind": KIND, "devices": devices}
    files.write(folder, FILE, json.dumps(content, separators=(",", ":")).encode())
