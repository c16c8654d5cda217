"""Everything a cluster is started from, as paths; building what the cache lacks."""

import hashlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import cache, debian, golang, images
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.families import Families, GoFamily, families, kubernetes_minor

PAUSE_IMAGE = "localhost/pause:1"
PAUSE_SOURCE = Path(__file__).with_name("pause.c")
BUSYBOX_IMAGE = "localhost/busybox:1"
RUNTIME_COMMANDS = {
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "setsid": "util-linux",
    "unshare": "util-linux",
}
"""Commands that starting a cluster calls on the machine itself, with the Debian package of each."""


BUILD_MINUTES = {"kubernetes": 11, "etcd": 1, "containerd": 2, "runc": 1, "base": 1}
"""Of two cores that do nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Paths of the built programs and images; all of them exist."""

    kubernetes_version: str
    kubernetes: Path
    etcd: Path
    containerd: Path
    runc: Path
    base: Path

    def program(self, name: str) -> Path:
        """Path of a program by its name, such as `kubelet` or `runc`."""
        for folder in (self.kubernetes, self.etcd, self.containerd, self.runc, self.base):
            if (folder / "bin" / name).exists():
                return folder / "bin" / name
        raise KeyError(f"no program {name} among the parts of the test cluster")

    @property
    def search_path(self) -> str:
        """Value for PATH that finds every part before the machine's own programs."""
        own = (self.kubernetes, self.etcd, self.containerd, self.runc, self.base)
        system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
        return ":".join([*(str(folder / "bin") for folder in own), *system])

    @property
    def images(self) -> tuple[Path, ...]:
        """OCI archives to import before the first pod."""
        return tuple(sorted((self.base / "images").glob("*.tar")))


def missing_parts(minor: str = "") -> list[str]:
    """Parts that `build_parts` would have to build first, each with the minutes that it takes."""
    wanted = [(each.name, each.label, each.key()) for each in families(minor or kubernetes_minor()).all()]
    wanted.append(("base", "base", _base_key()))
    return [
        f"{label} (about {BUILD_MINUTES[name]} min, once)"
        for name, label, key in wanted
        if not cache.is_built(label, key)
    ]


def build_parts(report: Report = lambda _line: None, minor: str = "") -> Parts:
    """Return the parts for a Kubernetes minor, else for that of the variable K8S, built on a miss.

    `report` gets one line per step. Raises BuildError with the remedy when something cannot be had.
    """
    wanted = families(minor or kubernetes_minor())
    started = time.monotonic()
    debian.ensure(RUNTIME_COMMANDS, report)
    parts = Parts(
        kubernetes_version=wanted.kubernetes.version,
        kubernetes=_go_family(wanted.kubernetes, report),
        etcd=_go_family(wanted.etcd, report),
        containerd=_go_family(wanted.containerd, report),
        runc=_go_family(wanted.runc, report),
        base=_base(report),
    )
    report(f"parts of Kubernetes {_versions(wanted)} ready in {time.monotonic() - started:.1f} s")
    return parts


def _versions(wanted: Families) -> str:
    rest = ", ".join(f"{family.name} {family.version}" for family in wanted.all()[1:])
    return f"{wanted.kubernetes.version} ({rest})"


def _go_family(family: GoFamily, report: Report) -> Path:
    def fill(into: Path) -> None:
        golang.compile_family(golang.find_go(report), family, into, report)

    return cache.folder(family.label, family.key(), fill, report)


def _base_key() -> str:
    sources = (PAUSE_SOURCE, Path(images.__file__), Path(__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _base(report: Report) -> Path:
    """Pause, busybox and their images."""

    def fill(into: Path) -> None:
        programs = into / "bin"
        programs.mkdir()
        debian.ensure({"gcc": "gcc", "/usr/include/stdlib.h": "libc6-dev"}, report)
        pause, busybox = programs / "pause", programs / "busybox"
        compiler = ["gcc", "-static", "-Os", "-s", "-Wall", "-Werror", "-o", str(pause), str(PAUSE_SOURCE)]
        run("compiling pause.c", compiler, timeout=60)
        package = into / "package"
        debian.unpack("busybox-static", package, report)
        next(package.rglob("bin/busybox")).rename(busybox)
        applets = run("listing busybox applets", [str(busybox), "--list"], timeout=30).split()
        (into / "images").mkdir()
        for image in (
            images.Image(name=PAUSE_IMAGE, entrypoint=["/pause"], programs={"pause": pause}),
            images.Image(
                name=BUSYBOX_IMAGE,
                entrypoint=["/bin/sh"],
                programs={"bin/busybox": busybox},
                links={f"bin/{applet}": "/bin/busybox" for applet in applets if applet != "busybox"},
            ),
        ):
            archive = image.name.rpartition("/")[2].replace(":", "-") + ".tar"
            images.write_archive(image, into / "images" / archive)
        shutil.rmtree(package)

    return cache.folder("base", _base_key(), fill, report)
