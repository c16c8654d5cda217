"""`python -m tests.gpu.kit FOLDER --python 3.12`: what the GPU tier needs on a machine without network.

FOLDER gets `wheels/` (of the versions in the locks), `mps/` (Debian's MPS programs, for a driver that brings
none), `limits/` (the enforcement library) and `programs/` (the tier's C programs), all for the architecture
of this machine.
`tests/gpu/offline FOLDER` uses it there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent.mps.binary import CONTROL, SERVER
from clib import build_library
from tests.gpu import built, limits
from tests.mps_binaries import SUITES, both_programs

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ("iniconfig", "packaging", "pluggy", "pygments", "pytest", "pytest-asyncio", "pytest-timeout")


def pinned(lock: str) -> dict[str, str]:
    """The line of each package with its version and hashes, from the text of a lock."""
    found: list[tuple[str, str]] = re.findall(
        r"^([A-Za-z0-9._-]+)(==.+)$", lock.replace("\\\n", " "), re.MULTILINE
    )
    return {name: name + rest for name, rest in found}


def wanted_packages() -> list[str]:
    """The lines of all that the agent needs, since the rooms that the tier reads change, and of pytest."""
    dev = pinned((ROOT / "requirements-dev.lock").read_text())
    return [*pinned((ROOT / "requirements.lock").read_text()).values(), *(dev[name] for name in PYTEST)]


def make(folder: Path, python: str, programs: Path | None = None) -> None:
    """Fill the folder, with the MPS programs of `programs`, or Debian's. Blocks.

    Raises CalledProcessError, MpsBinaryMissing, FileNotFoundError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "mps").mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--dest", str(folder / "wheels")]
    with tempfile.NamedTemporaryFile("w", suffix=".lock") as wanted:
        wanted.write("\n".join(wanted_packages()))
        wanted.flush()
        subprocess.run([*command, "--require-hashes", f"--requirement={wanted.name}"], check=True)
    (folder / "limits").mkdir()
    shutil.copy2(build_library.cached(), folder / "limits" / limits.NAME)
    shutil.copytree(built.program(built.SHARING).parent, folder / "programs")
    found = (programs / CONTROL, programs / SERVER) if programs else both_programs(max(SUITES))
    for program in found:
        shutil.copy2(program, folder / "mps")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the kit."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there (default: %(default)s)")
    parser.add_argument(
        "--mps", type=Path, help="folder of the driver's own MPS programs (default: Debian's)"
    )
    options = parser.parse_args(arguments)
    make(options.folder, options.python, options.mps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
