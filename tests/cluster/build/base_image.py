"""Two base images by debootstrap: one with pip to build on, one with nothing but Python to run on.

The second is what of the first belongs to a short list of packages: no shell, no package manager.
"""

import hashlib
import shutil
import tarfile
from pathlib import Path

from tests.cluster.build import cache
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.errors import BuildError

SUITE = "bookworm"
NAMES = ("build-base", "base")
INCLUDED = ("python3", "python3-pip", "ca-certificates")
KEPT = (
    "base-files", "ca-certificates", "libbz2-1.0", "libc6", "libcrypt1", "libexpat1", "libffi8", "libgcc-s1",
    "liblzma5", "libpython3-stdlib", "libpython3.11-minimal", "libpython3.11-stdlib", "libssl3", "libuuid1",
    "python3", "python3-minimal", "python3.11", "python3.11-minimal", "zlib1g",
)  # fmt: skip
DROPPED = ("usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/locale", "usr/share/python3")
UNUSED_MODULES = ("ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo")
# Made when packages are configured, so in no package's list.
MADE = ("etc/ssl/certs", "etc/ld.so.cache", "etc/ld.so.conf", "etc/ld.so.conf.d", "etc/nsswitch.conf")
LINKS = ("bin", "lib", "lib64", "sbin")
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/nonexistent\nnobody:x:65534:65534:nobody:/:/nonexistent\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
EMPTY = ("tmp", "proc", "sys", "dev", "run", "root", "var/run", "var/lib", "usr/local/bin")


def base(report: Report) -> Path:
    """A folder with `<name>.tar` for each of NAMES. Raises BuildError."""
    full = _full(report)

    def fill(into: Path) -> None:
        root, slim = into / "root", into / "slim"
        run("unpacking the build base", ["tar", "-xf", str(full), "-C", _made(root)], timeout=120)
        _pick(root, slim)
        _pack(slim, into / "base.tar")
        for folder in (root, slim):
            shutil.rmtree(folder)
        (into / full.name).hardlink_to(full)

    key = hashlib.sha256(str(full).encode() + Path(__file__).read_bytes()).hexdigest()[:12]
    return cache.folder(f"agent-base-{SUITE}", key, fill, report)


def _full(report: Report) -> Path:
    def fill(into: Path) -> None:
        root = into / "root"
        packages = f"--include={','.join(INCLUDED)}"
        report("base images: debootstrap (a minute)")
        run("debootstrap", ["debootstrap", "--variant=minbase", packages, SUITE, str(root)], timeout=900)
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        _pack(root, into / "build-base.tar")
        shutil.rmtree(root)

    key = hashlib.sha256(" ".join((SUITE, *INCLUDED)).encode()).hexdigest()[:12]
    return cache.folder("agent-debootstrap", key, fill, report) / "build-base.tar"


def _made(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


def _pick(root: Path, slim: Path) -> None:
    """Copy the kept packages' files."""
    for folder in EMPTY:
        (slim / folder).mkdir(parents=True, exist_ok=True)
    (slim / "tmp").chmod(0o1777)
    (slim / "var/run").rmdir()
    (slim / "var/run").symlink_to("/run")
    for name in LINKS:
        if (root / name).is_symlink():
            (slim / "usr" / name).mkdir(parents=True, exist_ok=True)
            (slim / name).symlink_to(f"usr/{name}")
    for package in KEPT:
        for path in _files(root, package):
            _copy(root, slim, path)
    for name in MADE:
        for made in (root / name, *(root / name).rglob("*")):
            if made.is_symlink() or made.exists():
                _copy(root, slim, str(made.relative_to(root)))
    for name in UNUSED_MODULES:
        shutil.rmtree(slim / "usr/lib/python3.11" / name, ignore_errors=True)
    for name, text in ACCOUNTS.items():
        (slim / name).write_text(text)


def _files(root: Path, package: str) -> list[str]:
    info = root / "var/lib/dpkg/info"
    found = next(iter([*info.glob(f"{package}.list"), *info.glob(f"{package}:*.list")]), None)
    if found is None:
        raise BuildError(f"package {package} is not in the debootstrapped system; correct KEPT in {__file__}")
    return [line.lstrip("/") for line in found.read_text().splitlines() if line not in ("/.", "")]


def _copy(root: Path, slim: Path, name: str) -> None:
    if name.startswith(DROPPED):
        return
    source, target = root / name, slim / name
    if source.is_symlink():
        if not target.is_symlink() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _pack(root: Path, archive: Path) -> None:
    with tarfile.open(archive, "w") as tar:
        for entry in sorted(root.iterdir()):
            if entry.name not in ("proc", "sys", "dev"):
                tar.add(entry, entry.name)
            else:
                folder = tarfile.TarInfo(entry.name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(folder)
