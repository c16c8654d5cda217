"""Abilities of drivers and GPUs: CUDA runtimes, by NVIDIA's rules and the product's own, and MPS. Pure.

NVIDIA's: CUDA Compatibility guide (minor-version compatibility, backward compatibility, the table of minimum
drivers) and the release notes' table of drivers by toolkit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from agent.model.gpu import Driver, Gpu

# Which CUDA versions go together: pure, for warnings only.

# Users of gpu-manager are promised vGPU up to this CUDA version; newer images are untested there.
VGPU_BASELINE = (12, 4)


def hooked(enforcement: str, library: str | None) -> bool:
    """Whether `vgpu.enforcement` puts another library than the agent's own into containers.

    The baseline is that of the product's library. The agent's own is made from the headers of CUDA 11.8, 12
    and 13.
    """
    return enforcement in ("library", "strict") and library is not None


def vgpu_warning(driver: Driver | None) -> str | None:
    """The caveat of vGPU under a driver; None: there is none, or no driver is known.

    The product's rule: driver and runtime of the baseline's major version, the runtime no newer than the
    baseline. The agent cannot see what runtime an image brings, so this is advice and refuses nothing.
    """
    if driver is None or driver.cuda_version[0] == VGPU_BASELINE[0]:
        return None
    baseline, served = dotted(VGPU_BASELINE), dotted(driver.cuda_version)
    if driver.cuda_version < VGPU_BASELINE:
        return (
            f"driver {driver.version} serves CUDA {served}, older than the baseline {baseline} of vGPU: "
            f"images built for CUDA {VGPU_BASELINE[0]} do not run; update the driver or use older images"
        )
    return (
        f"driver {driver.version} serves CUDA {served}, the baseline of vGPU is {baseline}: images built for "
        f"CUDA {VGPU_BASELINE[0]}.0 to {baseline} are covered, newer ones are not; whole GPUs take any"
    )


def dotted(version: tuple[int, int]) -> str:
    """`12.4`."""
    return f"{version[0]}.{version[1]}"


def semantic(text: str) -> str:
    """A driver's version as a semantic one, whose numbers begin with no 0; empty: it is none."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        return ""
    return ".".join(str(int(part)) for part in (*parts, "0", "0")[:3])


# Which CUDA runtimes run on which driver: the product's rules and NVIDIA's own. Pure.

Version = tuple[int, int]

# Driver branch -> newest CUDA version that it serves.
SERVED: dict[int, Version] = {
    450: (11, 0), 455: (11, 1), 460: (11, 2), 465: (11, 3), 470: (11, 4), 495: (11, 5), 510: (11, 6),
    515: (11, 7), 520: (11, 8), 525: (12, 0), 530: (12, 1), 535: (12, 2), 545: (12, 3), 550: (12, 4),
    555: (12, 5), 560: (12, 6), 565: (12, 7), 570: (12, 8), 575: (12, 9), 580: (13, 0), 590: (13, 1),
    615: (13, 4),
}  # fmt: skip
# CUDA major -> driver branch from which any of its minors run.
FLOORS = {11: 450, 12: 525, 13: 580}
# Images of that version are run under vGPU after a test of their own.
VGPU_CASE_BY_CASE: Version = (11, 8)


class Level(IntEnum):
    """How well something goes; the worst finding counts."""

    ALLOWED = 0
    UNSTABLE = 1
    BLOCKED = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one rule."""

    level: Level
    rule: Literal["product", "NVIDIA"]
    text: str


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """A driver: the CUDA version that it serves, and its branch (550 of 550.144.03) where known."""

    cuda: Version
    branch: int | None = None


def parse_version(text: str) -> Version:
    """`12.4` or `12.4.1`. Raises ValueError with the remedy."""
    parts = text.strip().split(".")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is no CUDA version; write it as 12.4")
    return int(parts[0]), int(parts[1])


def parse_driver(text: str) -> DriverFacts:
    """A driver's own number (550.144.03) or the CUDA version that it serves (12.4). Raises ValueError."""
    head = text.strip().partition(".")[0]
    if not head.isdigit():
        raise ValueError(f"{text!r} is no driver; write its number (550.144.03) or its CUDA version (12.4)")
    if int(head) < 100:
        return DriverFacts(parse_version(text))
    branch = int(head)
    known = [cuda for first, cuda in sorted(SERVED.items()) if first <= branch]
    if not known:
        raise ValueError(f"driver {text} is older than {min(SERVED)}, the oldest that is known here")
    return DriverFacts(known[-1], branch)


def findings(
    runtime: Version,
    driver: DriverFacts,
    mode: str,
    capability: Version | None = None,
    *,
    hooked: bool = True,
) -> list[Finding]:
    """Verdicts of all rules that apply, in the order in which people should read them.

    `hooked`: a library stands between vGPU containers and the driver, which knows the CUDA of the baseline.
    """
    found = _base(runtime, driver)
    if mode == "vgpu" and not hooked:
        text = (
            f"no library with the baseline {dotted(VGPU_BASELINE)} is loaded "
            "(vgpu.enforcement, vgpu.library): it does not apply"
        )
        found.append(Finding(Level.ALLOWED, "product", text))
    elif mode == "vgpu" and runtime[0] == driver.cuda[0] and driver.cuda[0] == VGPU_BASELINE[0]:
        found.append(_within_baseline(runtime))
    elif mode == "vgpu":
        found.append(_other_major(runtime, driver))
    if mode == "mps":
        found += _mps(driver, capability)
    return found


def verdict(found: list[Finding]) -> Level:
    """The worst of them."""
    return max((each.level for each in found), default=Level.ALLOWED)


def _base(runtime: Version, driver: DriverFacts) -> list[Finding]:
    served, wanted = dotted(driver.cuda), dotted(runtime)
    if driver.cuda >= runtime:
        found = [
            Finding(
                Level.ALLOWED, "product", f"the driver serves CUDA {served}, runtime {wanted} is no newer"
            )
        ]
        if driver.cuda[0] - runtime[0] > 1:
            found += [
                Finding(
                    Level.UNSTABLE,
                    "product",
                    f"CUDA {wanted} is more than one major version behind the driver's {served}: not tested",
                ),
                Finding(Level.ALLOWED, "NVIDIA", "drivers go on serving all older toolkits"),
            ]
        return found
    older = f"the driver serves CUDA {served}, older than runtime {wanted}"
    if runtime[0] != driver.cuda[0]:
        return [
            Finding(
                Level.BLOCKED,
                "product",
                f"{older}: programs fail, at times with CUDA_ERROR_UNKNOWN (999); update to driver "
                f"{FLOORS.get(runtime[0], 'newer')} or later, or use images for CUDA {driver.cuda[0]}",
            ),
            Finding(
                Level.BLOCKED,
                "NVIDIA",
                "another major version needs a newer driver; on data-centre GPUs alone, the package "
                "cuda-compat in the image can stand in for it",
            ),
        ]
    floor = FLOORS.get(runtime[0])
    if driver.branch is not None and floor is not None and driver.branch < floor:
        return [Finding(Level.BLOCKED, "NVIDIA", f"CUDA {runtime[0]} needs driver {floor} or later")]
    return [
        Finding(
            Level.UNSTABLE,
            "product",
            f"{older}: the product's rule refuses it; update the driver or use an image for CUDA {served}",
        ),
        Finding(
            Level.UNSTABLE,
            "NVIDIA",
            f"minor versions of CUDA {runtime[0]} are compatible: compiled kernels run, but what the "
            "driver must compile from PTX fails with CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)",
        ),
    ]


def _within_baseline(runtime: Version) -> Finding:
    baseline, wanted = dotted(VGPU_BASELINE), dotted(runtime)
    if runtime > VGPU_BASELINE:
        return Finding(
            Level.BLOCKED,
            "product",
            f"vGPU covers images up to CUDA {baseline}, not {wanted}; use an older image, or whole GPUs "
            "(100 cores), which take any",
        )
    if runtime == VGPU_BASELINE:
        return Finding(
            Level.ALLOWED, "product", f"CUDA {wanted} is the very baseline of vGPU; test before use"
        )
    return Finding(Level.ALLOWED, "product", f"CUDA {wanted} is within the baseline {baseline} of vGPU")


def _other_major(runtime: Version, driver: DriverFacts) -> Finding:
    baseline = dotted(VGPU_BASELINE)
    if runtime == VGPU_CASE_BY_CASE and driver.cuda[0] == VGPU_BASELINE[0]:
        text = f"vGPU takes {dotted(runtime)} beside its baseline {baseline} case by case: test each image"
        return Finding(Level.UNSTABLE, "product", text)
    return Finding(
        Level.BLOCKED,
        "product",
        f"vGPU wants runtime ({dotted(runtime)}), driver ({dotted(driver.cuda)}) and baseline ({baseline}) "
        "of one major version; use whole GPUs (100 cores) for this image",
    )


def _mps(driver: DriverFacts, capability: Version | None) -> list[Finding]:
    found = []
    if driver.cuda < LEAST_CUDA:
        needed = dotted(LEAST_CUDA)
        text = f"memory limits of MPS need a driver for CUDA {needed} or later, not {dotted(driver.cuda)}"
        found.append(Finding(Level.BLOCKED, "NVIDIA", text))
    if capability is not None and capability < LEAST_COMPUTE_CAPABILITY:
        needed = dotted(LEAST_COMPUTE_CAPABILITY)
        text = f"MPS needs compute capability {needed} (Volta) or later, not {dotted(capability)}"
        found.append(Finding(Level.BLOCKED, "NVIDIA", text))
    return found or [Finding(Level.ALLOWED, "NVIDIA", "driver and GPU have what MPS needs")]


# Abilities of MPS by GPU: gates, the ceiling of clients, and the limits a container gets. Pure.
#
# Facts from NVIDIA's MPS documentation: Volta and later give each client its own address space, the limit of
# device memory per client needs a driver for CUDA 11.5, a GPU serves 16 clients before Volta, 48 since, and
# 60 with drivers for CUDA 13.1 and later.

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
