"""Which CUDA versions go together: pure, for warnings only."""

from agent.model.gpu import Driver

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
