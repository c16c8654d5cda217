"""Images with a C library in them, from Debian's packages: one as Debian's and one as Alpine's are.

What NVIDIA's hooks do to a container depends on its C library, and busybox has none.
"""

import hashlib
import shutil
from pathlib import Path

from tests.cluster.build import cache, debian, images
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run

GLIBC_IMAGE = "localhost/glibc:1"
MUSL_IMAGE = "localhost/musl:1"
PROBE = "bin/probe"
"""In both images: linked with libcuda.so.1, which the container's own loader must find."""
_STUB = "int cuInit(unsigned flags) { return (int)flags; }\n"
_PROBE = "int cuInit(unsigned flags);\nint main(void) { return cuInit(0); }\n"


def build(shell: Path, report: Report = lambda _line: None) -> tuple[Path, ...]:
    """Archives of both images, built on a miss; `shell` is a static busybox. Raises BuildError."""
    sources = (Path(__file__), Path(images.__file__), Path(debian.__file__))
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]

    def fill(into: Path) -> None:
        for package in ("libc6", "libc-bin", "musl"):
            debian.unpack(package, into / package, report)
        for image in (_glibc(into, shell), _musl(into, shell)):
            images.write_archive(image, into / f"{image.name.rpartition('/')[2].replace(':', '-')}.tar")
        for package in ("libc6", "libc-bin", "musl", "probe"):
            shutil.rmtree(into / package)

    return tuple(sorted(cache.folder("libc-images", key, fill, report).glob("*.tar")))


def stub(folder: Path, name: str, soname: str) -> Path:
    """A library that stands for the driver's libcuda, linked with nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / f".{name}.c", folder / name
    source.write_text(_STUB)
    flags = ["-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}"]
    run("compiling a stand-in of libcuda", ["gcc", *flags, "-o", str(library), str(source)], timeout=60)
    source.unlink()
    return library


def _probe(into: Path, name: str, flags: list[str]) -> Path:
    library = stub(into / "probe", "libcuda.so.1", "libcuda.so.1")
    source, program = into / "probe" / "probe.c", into / "probe" / name
    source.write_text(_PROBE)
    run("compiling the probe", ["gcc", *flags, "-o", str(program), str(source), str(library)], timeout=60)
    return program


def _file(into: Path, name: str, text: str) -> Path:
    file = into / "probe" / name
    file.write_text(text)
    return file


def _shell(shell: Path) -> dict[str, Path]:
    return {"bin/busybox": shell}


_APPLETS = {f"bin/{name}": "/bin/busybox" for name in ("sh", "cat", "find", "ls", "sleep", "kill")}


def _glibc(into: Path, shell: Path) -> images.Image:
    probe = _probe(into, "glibc", [])
    loader = next((into / "libc6").rglob("ld-linux-*.so.?"))
    libc = next((into / "libc6").rglob("libc.so.6"))
    (ldconfig,) = (into / "libc-bin").rglob("sbin/ldconfig")
    return images.Image(
        name=GLIBC_IMAGE,
        entrypoint=["/bin/sh"],
        programs={
            **_shell(shell),
            PROBE: probe,
            "lib64/" + loader.name: loader.resolve(),
            f"usr/lib/{libc.parent.name}/libc.so.6": libc.resolve(),
            "sbin/ldconfig": ldconfig,
            "etc/debian_version": _file(into, "debian_version", "12\n"),
        },
        links=_APPLETS,
    )


def _musl(into: Path, shell: Path) -> images.Image:
    loader = next((into / "musl").rglob("libc.so"))
    (name,) = (each.name for each in (into / "musl").rglob("ld-musl-*.so.1"))
    # Without a C library: this machine's is glibc. The loader lists what the probe needs, nobody runs it.
    probe = _probe(into, "musl", ["-nostdlib", "-Wl,-e,main", f"-Wl,--dynamic-linker=/lib/{name}"])
    return images.Image(
        name=MUSL_IMAGE,
        entrypoint=["/bin/sh"],
        programs={
            **_shell(shell),
            PROBE: probe,
            f"lib/{name}": loader,
            # By this file the hooks know Alpine, the distribution that is built on musl.
            "etc/alpine-release": _file(into, "alpine-release", "3.22.0\n"),
        },
        links={**_APPLETS, "bin/ldd": f"/lib/{name}"},
    )
