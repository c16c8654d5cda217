"""An image with Python on a C library as Debian has both, for CUDA programs that tests command."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.build import cache, debian, images
from tests.cluster.build.cache import Report

PYTHON_IMAGE = "localhost/python:1"
PYTHON = "/usr/bin/python3"
_APPLETS = ("sh", "cat", "env", "find", "kill", "ls", "sleep")
_LEFT_OUT = ("usr/share/", "usr/lib/python3/", "lib2to3/", "idlelib/", "test/", "gconv/")


def build(shell: Path, report: Report = lambda _line: None) -> Path:
    """The image's archive, built on a miss; `shell` is a static busybox. Raises BuildError."""
    sources = (Path(__file__), Path(images.__file__), Path(debian.__file__))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]

    def fill(into: Path) -> None:
        debian.unpack("python3-minimal", into / "root", report)
        # Which Python that is differs by the machine's release.
        name = (into / "root" / PYTHON.lstrip("/")).readlink().name
        stdlib = (f"{name}-minimal", f"lib{name}-minimal", f"lib{name}-stdlib")
        for package in (*stdlib, "libc6", "libffi8", "libexpat1", "zlib1g"):
            debian.unpack(package, into / package, report)
        contents = {path: file for folder in into.iterdir() for path, file in _files(folder)}
        loader = next(path for path in contents if Path(path).match("ld-linux-*.so.?"))
        image = images.Image(
            name=PYTHON_IMAGE,
            entrypoint=["/bin/sh"],
            programs={**contents, f"lib64/{Path(loader).name}": contents[loader], "bin/busybox": shell},
            links={PYTHON.lstrip("/"): f"/usr/bin/{name}"}
            | {f"bin/{applet}": "/bin/busybox" for applet in _APPLETS},
        )
        images.write_archive(image, into / "python.tar")
        for folder in [each for each in into.iterdir() if each.is_dir()]:
            shutil.rmtree(folder)

    return cache.folder("python-image", key, fill, report) / "python.tar"


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Files of a package by their path in the image, where links are copies."""
    for file in root.rglob("*"):
        path = str(file.relative_to(root))
        if file.is_symlink():
            target = file.readlink()
            found = root / str(target).lstrip("/") if target.is_absolute() else file.parent / target
        else:
            found = file
        if found.is_file() and not any(part in f"{path}/" for part in _LEFT_OUT):
            yield path, found
