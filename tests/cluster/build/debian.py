"""Debian packages: tools installed where they are missing, other packages unpacked and never installed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.build.cache import Report, cache_root
from tests.cluster.build.commands import run
from tests.cluster.build.errors import BuildError

LISTS = Path("/var/lib/apt/lists")


def ensure(needs: Mapping[str, str], report: Report) -> None:
    """Make every command or absolute path in `needs` (-> its Debian package) available."""
    missing = {name: package for name, package in needs.items() if not _present(name)}
    if not missing:
        return
    names, packages = ", ".join(sorted(missing)), sorted(set(missing.values()))
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise BuildError(
            f"missing on this machine: {names}; install the packages {' '.join(packages)} (or run this as "
            "root on Debian, where they are installed for you)"
        )
    report(f"installing {' '.join(packages)} (missing: {names})")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", *_options(fresh=not _have_lists(), report=report), "install", "-y", "-q"]
    run("installing packages", [*install, "--no-install-recommends", *packages], timeout=600, env=env)


def _present(name: str) -> bool:
    return Path(name).exists() if name.startswith("/") else shutil.which(name) is not None


def unpack(package: str, into: Path, report: Report) -> None:
    """Download a package and unpack its files under `into`; the machine's package database is not touched."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise BuildError(f"package {package} is needed, and this is neither Debian nor Ubuntu (no apt-get)")
    downloads = into.parent / f"{into.name}.deb.d"
    downloads.mkdir(parents=True)
    try:
        _download(package, downloads, report)
        (archive,) = downloads.glob("*.deb")
        run(f"unpacking {package}", ["dpkg-deb", "-x", str(archive), str(into)], timeout=60)
    finally:
        shutil.rmtree(downloads)


def _download(package: str, into: Path, report: Report) -> None:
    def attempt(fresh: bool) -> None:
        argv = ["apt-get", *_options(fresh=fresh, report=report), "download", package]
        run(f"downloading {package}", argv, timeout=300, cwd=into)

    if not _have_lists():
        attempt(fresh=True)
        return
    try:
        attempt(fresh=False)
    except BuildError:
        # The machine's lists may name a version that the mirror has since replaced.
        attempt(fresh=True)


def _have_lists() -> bool:
    return any(LISTS.glob("*Packages*"))


def _options(*, fresh: bool, report: Report) -> list[str]:
    """Options for apt-get; `fresh` reads package lists of our own, so that the machine's stay as they are."""
    # Of tests that run at once, several may install something.
    options = ["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300"]
    if not fresh:
        return options
    private = cache_root() / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (private / part).mkdir(parents=True, exist_ok=True)
    options += ["-o", f"Dir::State::Lists={private}/lists", "-o", f"Dir::Cache={private}/cache"]
    report("reading package lists")
    run("reading package lists", ["apt-get", *options, "update", "-q"], timeout=300)
    return options
