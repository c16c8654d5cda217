"""A base image to build the agent's image on, by debootstrap: Debian with Python and pip."""

import hashlib
import shutil
import tarfile
from pathlib import Path

from tests.cluster.build import cache
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run

SUITE = "bookworm"
NAME = "build-base"
INCLUDED = ("python3", "python3-pip", "ca-certificates")


def base(report: Report) -> Path:
    """A folder with `build-base.tar`. Raises BuildError."""

    def fill(into: Path) -> None:
        root = into / "root"
        packages = f"--include={','.join(INCLUDED)}"
        report("base image: debootstrap (a minute)")
        run("debootstrap", ["debootstrap", "--variant=minbase", packages, SUITE, str(root)], timeout=900)
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        _pack(root, into / f"{NAME}.tar")
        shutil.rmtree(root)

    key = hashlib.sha256(" ".join((SUITE, *INCLUDED)).encode()).hexdigest()[:12]
    return cache.folder("agent-debootstrap", key, fill, report)


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for entry in sorted(root.iterdir()):
            if entry.name not in ("proc", "sys", "dev"):
                tar.add(entry, entry.name)
            else:
                folder = tarfile.TarInfo(entry.name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
