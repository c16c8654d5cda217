"""Abilities of MPS by GPU: gates, the ceiling of clients, and the limits a container gets. Pure.

Facts from NVIDIA's MPS documentation: Volta and later give each client its own address space, the limit of
device memory per client needs a driver for CUDA 11.5, a GPU serves 16 clients before Volta, 48 since, and 60
with drivers for CUDA 13.1 and later.
"""

from collections.abc import Mapping

from agent.model.compat import dotted
from agent.model.gpu import Driver, Gpu

LEAST_COMPUTE_CAPABILITY = (7, 0)
LEAST_CUDA = (11, 5)
# (least compute capability, least CUDA version of the driver) -> clients, the first row that fits counts.
CLIENT_CEILINGS = (((7, 0), (13, 1), 60), ((7, 0), (0, 0), 48), ((0, 0), (0, 0), 16))

# The longest path of a control daemon's sockets below the agent's run folder; UUIDs of GPUs are equally long.
LONGEST_SOCKET = "/mps/GPU-00000000-0000-0000-0000-000000000000/pipe/control_privileged"

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
CLIENT_PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"  # of the two priorities that MPS knows


def refusal(gpu: Gpu, driver: Driver | None, program_problem: str | None = None) -> str | None:
    """Why a GPU cannot be offered as MPS shares, with the remedy; None: it can.

    `program_problem` is what keeps the node from running the control daemon, None if nothing.
    """
    if gpu.mig_enabled:
        return "the GPU is in MIG mode, which MPS mode does not serve; turn MIG off with nvidia-smi -mig 0"
    if gpu.compute_capability < LEAST_COMPUTE_CAPABILITY:
        return (
            f"MPS shares need compute capability {dotted(LEAST_COMPUTE_CAPABILITY)} (Volta) or newer, "
            f"{gpu.product} has {dotted(gpu.compute_capability)}; offer it as pgpu or vgpu"
        )
    if driver is not None and driver.cuda_version < LEAST_CUDA:
        return (
            f"MPS memory limits need a driver for CUDA {dotted(LEAST_CUDA)} or newer, "
            f"driver {driver.version} serves {dotted(driver.cuda_version)}; update the driver"
        )
    return program_problem


def client_ceiling(gpu: Gpu, driver: Driver | None) -> int:
    """How many containers may hold MPS shares of a GPU at once: each is at least one client of its server."""
    cuda = driver.cuda_version if driver else (0, 0)
    for capability, version, clients in CLIENT_CEILINGS:
        if gpu.compute_capability >= capability and cuda >= version:
            return clients
    raise AssertionError("the last row fits every GPU")


def limits(cores: int, gibibytes: int) -> Mapping[str, str]:
    """The variables that cap each CUDA process of a container.

    The memory limit has exactly one entry, keyed by index 0, the only GPU that the container sees: an entry
    for a GPU that a process does not see makes the driver drop all limits.
    """
    found: dict[str, str] = {}
    if cores:
        found[THREAD_PERCENTAGE] = str(cores)
    if gibibytes:
        found[MEMORY_LIMIT] = f"0={gibibytes}G"
    return found
