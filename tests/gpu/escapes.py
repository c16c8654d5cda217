"""Attempts of a tenant to get more than its cap; the numbers are those of docs/security.md.

A program runs as in a container: a mount namespace with the container's folder at a path of its own and an
/etc whose ld.so.preload names the library.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PIECE_MIB = 64
PLACE = Path("/mnt")  # of the container's folder, as its programs see it
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
WAYS: dict[str, list[str]] = {
    "1 environment emptied": ["env", "-i"],
    "1 own LD_PRELOAD": ["env", "LD_PRELOAD=libm.so.6"],
    "2 another user": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
    "2 subprocess of a subprocess": ["sh", "-c", 'env -i "$@"', "sh"],
    "2 new session": ["setsid", "--wait"],
    "3 limits in the environment": ["env", "CUDA_DEVICE_MEMORY_LIMIT=64g", "NVIDIA_GPU_MEMORY_LIMIT=65536"],
    "4 switches of others": [
        "env",
        "CUDA_DISABLE_CONTROL=true",
        "DISABLE_VGPU=1",
        "GPU_CORE_UTILIZATION_POLICY=disable",
    ],
    "8 loader called by hand": [
        next((it for it in LOADERS if Path(it).exists()), LOADERS[0]),
        "--preload",
        "",
    ],
    "20 forged MPS limit": ["env", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=64G"],
}
_ETC = ("ld.so.cache", "passwd", "group", "nsswitch.conf")


def etc(folder: Path, library: str) -> Path:
    """An /etc for containers that preloads a library of PLACE. Blocks."""
    folder.mkdir()
    for name in _ETC:
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), folder)
    (folder / "ld.so.preload").write_text(f"{PLACE / library}\n")
    return folder


def contained(
    command: list[str],
    folder: Path,
    own_etc: Path,
    *mounts: str,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The output of a command in a container. Blocks. Raises CalledProcessError."""
    steps = (f"mount --bind {folder} {PLACE}", *mounts, f"mount --bind {own_etc} /etc", 'exec "$@"')
    done = subprocess.run(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", " && ".join(steps), "sh", *command],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=60,
        check=False,
    )
    if done.returncode:
        error = subprocess.CalledProcessError(done.returncode, command)
        error.add_note(done.stderr)
        raise error
    return done.stdout
