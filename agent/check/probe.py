"""A container's view of its GPUs: run inside, by the agent's program or by any shell."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.vgpu.isolation_errors import BadLayout
from agent.vgpu.layout import LIMITS_BYTES, read_limits
from agent.vgpu.library import IN_CONTAINER

DEVICE, VARIABLE, CAP, DRIVER_PROGRAM = "device: ", "variable: ", "cap: ", "nvidia-smi: "
NO_PROGRAM = "not there"
PREFIXES = ("NVIDIA_", "CUDA_")
SMI_SECONDS = 60.0
MIB = 1 << 20
# Where a driver's programs come to, which an image's own PATH may leave out; the second on GKE.
FOLDERS = ("usr/bin", "usr/local/nvidia/bin")
# The same for images that have a shell and not this program. It needs no program but the shell.
SCRIPT = f"""
for each in /dev/nvidia* /dev/dxg; do if [ -c "$each" ]; then echo "{DEVICE}$each"; fi; done
export -p | while read -r word each; do
  case $each in {"|".join(f"{prefix}*" for prefix in PREFIXES)}) echo "{VARIABLE}$each";; esac
done
PATH=$PATH:{":".join(f"/{folder}" for folder in FOLDERS)}
if [ -f {IN_CONTAINER}/limits ]; then echo "{CAP}limits of memory are mounted"; fi
if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi; echo "{DRIVER_PROGRAM}ended with $?"
else echo "{DRIVER_PROGRAM}{NO_PROGRAM}"; fi
"""


def seen(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Iterator[str]:
    """Lines, the output of `nvidia-smi` among them. Blocks."""
    for node in (*sorted((root / "dev").glob("nvidia*")), root / "dev/dxg"):
        if node.is_char_device():
            yield f"{DEVICE}/{node.relative_to(root)}"
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIXES):
            yield f"{VARIABLE}{name}={value}"
    yield from _caps(root / IN_CONTAINER.strip("/") / "limits")
    places = (environment.get("PATH", ""), *(str(root / folder) for folder in FOLDERS))
    program = shutil.which("nvidia-smi", path=":".join(places))
    if program is None:
        yield f"{DRIVER_PROGRAM}{NO_PROGRAM}"
        return
    try:
        done = subprocess.run(
            [program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SMI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield f"{DRIVER_PROGRAM}failed: {error}"
        return
    yield from done.stdout.splitlines()
    yield f"{DRIVER_PROGRAM}ended with {done.returncode}"


def _caps(file: Path) -> Iterator[str]:
    try:
        for each in read_limits(file.read_bytes()[:LIMITS_BYTES]):
            yield f"{CAP}{each.memory_bytes // MIB} MiB of {each.gpu}"
    except FileNotFoundError:
        return
    except (OSError, BadLayout) as error:
        yield f"{CAP}cannot be read: {error}"
