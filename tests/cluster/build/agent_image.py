"""The agent's image from the project's Dockerfile, without a registry and without an engine.

`python -m tests.cluster.build.agent_image FILE` writes it as an OCI archive, as `ctr images import` takes it.
"""

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from agent.isolation.clib import build as clib
from agent.isolation.clib import wheels as clib_wheels
from tests.cluster.build import base_image, cache, debian
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.container_toolkit import CONTAINER_TOOLKIT, container_toolkit
from tests.cluster.build.errors import BuildError

IMAGE = "localhost/gpu-node-agent:test"
REPOSITORY = Path(__file__).parents[3]
TOOLS = {"buildah": "buildah", "debootstrap": "debootstrap"}
FILES = (
    "Dockerfile",
    ".dockerignore",
    "requirements.lock",
    ".ci/build-toolkit",
    ".ci/container-toolkit/go.mod",
    ".ci/container-toolkit/go.sum",
    ".ci/finish-image",
    ".ci/slim-root",
)


def build(report: Report) -> Path:
    """The archive, built when the sources have changed. Raises BuildError."""
    debian.ensure(TOOLS, report)
    base = base_image.base(report)
    key = _key(base)

    def fill(into: Path) -> None:
        context = into / "context"
        _prepare(context, report)
        _build(context, base, into, report)
        shutil.rmtree(context)

    for stale in cache.cache_root().glob("agent-image-*"):
        if stale.name != f"agent-image-{key}":
            shutil.rmtree(stale, ignore_errors=True)
    return cache.folder("agent-image", key, fill, report) / "agent.tar"


def _sources() -> list[Path]:
    agent = [path for path in (REPOSITORY / "agent").rglob("*") if path.is_file()]
    return sorted(REPOSITORY / name for name in FILES) + sorted(
        path for path in agent if "__pycache__" not in path.parts
    )


def _key(base: Path) -> str:
    recipe = f"{base.name} {CONTAINER_TOOLKIT.key()}"
    digest = hashlib.sha256(recipe.encode() + Path(__file__).read_bytes())
    for path in _sources():
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _prepare(context: Path, report: Report) -> None:
    """What the Dockerfile copies, and wheels and library, so that the build itself needs no network."""
    for path in _sources():
        target = context / path.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    lock = REPOSITORY / "requirements.lock"

    def fill(into: Path) -> None:
        fixed = ["download", "--quiet", "--require-hashes", "--only-binary=:all:", "--no-deps"]
        version = ["--python-version=3.11", "--implementation=cp"]
        pip = [sys.executable, "-m", "pip", *fixed, *version, f"--dest={into}", f"--requirement={lock}"]
        run("downloading the wheels", pip, timeout=600)

    key = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    shutil.copytree(cache.folder("wheels", key, fill, report), context / "wheels")
    shutil.copytree(container_toolkit(report), context / "toolkit")
    (context / "lib").mkdir()
    try:
        shutil.copy2(clib.cached(), context / "lib")
    except clib_wheels.BuildError as error:
        raise BuildError(f"building the enforcement library: {error}") from error


def _build(context: Path, base: Path, into: Path, report: Report) -> None:
    # vfs and chroot: neither overlay mounts nor namespaces are asked of the machine.
    with tempfile.TemporaryDirectory(prefix="gna-buildah-", dir="/var/tmp") as scratch:
        storage = [f"--root={scratch}/root", f"--runroot={scratch}/run", "--storage-driver=vfs"]
        buildah = ["buildah", *storage]
        report("agent image: reading its base")
        name = base_image.NAME
        dockerfile = Path(scratch) / f"Dockerfile.{name}"
        dockerfile.write_text(f"FROM scratch\nADD {name}.tar /\n")
        argv = ["bud", "--isolation=chroot", f"--tag=localhost/{name}", f"--file={dockerfile}", str(base)]
        run(f"importing {name}", [*buildah, *argv], timeout=300)
        report("agent image: building")
        argv = [
            "bud",
            "--isolation=chroot",
            "--pull-never",
            "--squash",
            f"--build-arg=BUILD_BASE=localhost/{name}",
            f"--tag={IMAGE}",
            str(context),
        ]
        run("building the agent's image", [*buildah, *argv], timeout=600)
        destination = f"oci-archive:{into}/agent.tar:{IMAGE}"
        run("writing the image", [*buildah, "push", "--quiet", IMAGE, destination], timeout=300)


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 with the reason; 2 for a wrong command line."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tests.cluster.build.agent_image FILE\n")
        return 2
    try:
        built = build(lambda line: print(line, file=sys.stderr, flush=True))
    except BuildError as error:
        sys.stderr.write(f"image: {error}\n")
        return 1
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(built, target)
    print(f"{target}: {IMAGE}, {target.stat().st_size / 1e6:.1f} MB packed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
