"""The agent's image from the project's Dockerfile, without a registry and without an engine.

`python -m tests.cluster.build.agent_image FILE [ARCHITECTURE]` writes it as an OCI archive, as
`ctr images import` takes it. For another processor than the machine's own (amd64, arm64) the programs are
cross-compiled, and the rest of the Dockerfile runs under qemu-user.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import build_version
from clib import build_library as clib
from clib import wheels as clib_wheels
from tests.cluster.build import base_image, cache, debian, emulation
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.container_toolkit import container_toolkit, toolkit_family
from tests.cluster.build.errors import BuildError

IMAGE = "localhost/gpu-node-agent:test"
REPOSITORY = Path(__file__).parents[3]
TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap"}
KEPT_SECONDS = 6 * 3600.0
MANYLINUX = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_31", "manylinux_2_36")
"""Wheels that Debian 12 runs, where pip downloads for another processor."""
FILES = (
    "Dockerfile",
    ".dockerignore",
    "requirements.lock",
    ".ci/build-toolkit",
    ".ci/container-toolkit/go.mod",
    ".ci/container-toolkit/go.sum",
    ".ci/container-toolkit/go.lock",
    ".ci/finish-image",
    ".ci/slim-root",
)

FOLDERS = ("agent", ".ci/clib")


def build(report: Report, architecture: str = "", version: str = "") -> Path:
    """The archive, built when sources or version have changed. Raises BuildError.

    `architecture` is Debian's name of a processor; empty: the machine's own. `version` is what its program
    says; empty: what is written, so that tests build it again for other sources only.
    """
    _able()
    own = emulation.own_architecture()
    wanted = architecture or own
    foreign = "" if wanted == own else wanted
    debian.ensure(TOOLS, report)
    base = base_image.base(report, wanted)
    key = _key(wanted, foreign, version)
    family = f"agent-image{'-' + foreign if foreign else ''}"

    def fill(into: Path) -> None:
        context = into / "context"
        _prepare(context, foreign, report)
        with emulation.emulated(wanted, report):
            _build(context, base, into, wanted, version, report)
        shutil.rmtree(context)

    for stale in cache.cache_root().glob(f"{family}-{'[0-9a-f]' * 12}"):
        # Not at once: another checkout may be running its tests with it.
        if stale.name != f"{family}-{key}" and stale.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(stale, ignore_errors=True)
    return cache.folder(family, key, fill, report) / "agent.tar"


def _sources() -> list[Path]:
    below = [path for name in FOLDERS for path in (REPOSITORY / name).rglob("*") if path.is_file()]
    return sorted(REPOSITORY / name for name in FILES) + sorted(
        path for path in below if "__pycache__" not in path.parts
    )


def is_built() -> bool:
    """Whether the cache has the image of these sources, for the machine's own processor."""
    return cache.is_built("agent-image", _key(emulation.own_architecture(), "", ""))


def _key(architecture: str, foreign: str, version: str) -> str:
    recipe = f"{'-'.join(base_image.place(architecture))} {toolkit_family(foreign).key()} {version}"
    digest = hashlib.sha256(recipe.encode() + Path(__file__).read_bytes())
    for path in _sources():
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _prepare(context: Path, foreign: str, report: Report) -> None:
    """Files that the Dockerfile copies; with wheels, programs and library the build needs no network."""
    for path in _sources():
        target = context / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    lock = REPOSITORY / "requirements.lock"

    def fill(into: Path) -> None:
        fixed = ["download", "--quiet", "--require-hashes", "--only-binary=:all:", "--no-deps"]
        version = ["--python-version=3.11", "--implementation=cp"]
        machine = emulation.ARCHITECTURES[foreign] if foreign else ""
        version += [f"--platform={kind}_{machine}" for kind in MANYLINUX if machine]
        pip = [sys.executable, "-m", "pip", *fixed, *version, f"--dest={into}", f"--requirement={lock}"]
        run("downloading the wheels", pip, timeout=600)

    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    wheels = f"wheels{'-' + foreign if foreign else ''}"
    shutil.copytree(cache.folder(wheels, key, fill, report), context / "wheels")
    shutil.copytree(container_toolkit(report, foreign), context / "toolkit")
    (context / "lib").mkdir()
    try:
        shutil.copy2(clib.cached(emulation.ARCHITECTURES.get(foreign, "")), context / "lib")
    except clib_wheels.BuildError as error:
        raise BuildError(f"building the enforcement library: {error}") from error


def _build(context: Path, base: Path, into: Path, architecture: str, version: str, report: Report) -> None:
    # vfs and chroot: neither overlay mounts nor namespaces are asked of the machine.
    with tempfile.TemporaryDirectory(prefix="gna-buildah-", dir="/var/tmp") as scratch:
        storage = [f"--root={scratch}/root", f"--runroot={scratch}/run", "--storage-driver=vfs"]
        buildah = ["buildah", *storage]
        report("agent image: reading its base")
        name = base_image.NAME
        dockerfile = Path(scratch) / f"Dockerfile.{name}"
        dockerfile.write_text(f"FROM scratch\nADD {name}.tar /\n")
        chroot = ["bud", "--isolation=chroot", f"--arch={architecture}"]
        argv = [*chroot, f"--tag=localhost/{name}", f"--file={dockerfile}", str(base)]
        run(f"importing {name}", [*buildah, *argv], timeout=300)
        report("agent image: building")
        argv = [
            *chroot,
            "--pull-never",
            "--squash",
            f"--build-arg=BUILD_BASE=localhost/{name}",
            f"--build-arg=VERSION={version}",
            f"--tag={IMAGE}",
            str(context),
        ]
        run("building the agent's image", [*buildah, *argv], timeout=1800)
        destination = f"oci-archive:{into}/agent.tar:{IMAGE}"
        run("writing the image", [*buildah, "push", "--quiet", IMAGE, destination], timeout=300)


def _able() -> None:
    """Raise BuildError where this way cannot be gone, with the other one."""
    root = os.geteuid() == 0
    if not root or not (shutil.which("apt-get") or all(map(shutil.which, TOOLS))):
        raise BuildError(
            f"without an engine an image is built by {' and '.join(TOOLS)}, which needs root"
            f"{' on Debian or Ubuntu' if root else ''}; anywhere else, and as a user: docker build "
            '--build-arg VERSION="$(.ci/release version --package)" -t NAME .'
        )


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 with the reason; 2 for a wrong command line."""
    if len(arguments) not in (1, 2) or not set(arguments[1:]) <= {"", *emulation.ARCHITECTURES}:
        known = "|".join(emulation.ARCHITECTURES)
        sys.stderr.write(f"usage: python -m tests.cluster.build.agent_image FILE [{known}]\n")
        return 2
    version = build_version.package(REPOSITORY)
    architecture = arguments[1] if arguments[1:] else ""
    try:
        built = build(lambda line: print(line, file=sys.stderr, flush=True), architecture, version)
    except BuildError as error:
        sys.stderr.write(f"image: {error}\n")
        return 1
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(built, target)
    print(f"{target}: {IMAGE} {version}, {target.stat().st_size / 1e6:.1f} MB packed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
