"""A base image to build the agent's image on, by debootstrap: Debian with Python and pip."""

import hashlib
import shutil
import tarfile
from pathlib import Path

from tests.cluster.build import cache, debian, emulation
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run

SUITE = "bookworm"
NAME = "build-base"
INCLUDED = ("python3", "python3-pip", "ca-certificates")


def base(report: Report, architecture: str) -> Path:
    """A folder with `build-base.tar` for a processor by Debian's name. Raises BuildError."""
    foreign = architecture != emulation.own_architecture()

    def fill(into: Path) -> None:
        root = into / "root"
        packages = f"--include={','.join(INCLUDED)}"
        debian.ensure({"debootstrap": "debootstrap"}, report)
        report(f"base image: debootstrap for {architecture} ({'ten minutes' if foreign else 'a minute'})")
        argv = ["debootstrap", f"--arch={architecture}", "--variant=minbase", packages]
        with emulation.emulated(architecture, report):
            run("debootstrap", [*argv, *(["--foreign"] if foreign else []), SUITE, str(root)], timeout=900)
            if foreign:
                second = ["chroot", str(root), "/debootstrap/debootstrap", "--second-stage"]
                run("debootstrap's second stage", second, timeout=1800)
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        _pack(root, into / f"{NAME}.tar")
        shutil.rmtree(root)

    return cache.folder(*place(architecture), fill, report)


def place(architecture: str) -> tuple[str, str]:
    """Family and key in the cache."""
    foreign = architecture != emulation.own_architecture()
    recipe = (SUITE, *INCLUDED, *([architecture] if foreign else []))
    key = hashlib.sha256(" ".join(recipe).encode()).hexdigest()[:12]
    return f"agent-debootstrap{'-' + architecture if foreign else ''}", key


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for entry in sorted(root.iterdir()):
            if entry.name not in ("proc", "sys", "dev"):
                tar.add(entry, entry.name)
            else:
                folder = tarfile.TarInfo(entry.name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
