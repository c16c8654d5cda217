"""The real MPS control daemons for tests: Debian's non-free packages, unpacked into the user's cache.

Nothing is installed and the machine's package sources and lists stay as they are: a source file of our own
names the archive that the machine already uses, and apt keeps its lists and archives in our folder.
`python -m tests.mps_binaries` fetches all of them and prints where they are.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SUITES = {"535": "bookworm", "550": "trixie"}  # major version of the driver -> Debian suite that has it
PACKAGE = "nvidia-cuda-mps"
PROGRAM = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
FETCH_SECONDS = 300


class MpsBinaryMissing(Exception):
    """The program cannot be had on this machine; the text says why and what helps."""


def control_program(major: str) -> Path:
    """Path of `nvidia-cuda-mps-control` of driver `major` (a key of SUITES), fetched on the first call.

    The folder of the program holds it alone, so that it can serve as a PATH entry or a driver root's
    `usr/bin`. Raises MpsBinaryMissing.
    """
    return _program(_cached(major, major, (PROGRAM,)))


def both_programs(major: str) -> tuple[Path, Path]:
    """Control and server program in one folder, for machines with a GPU. Raises MpsBinaryMissing."""
    root = _cached(f"{major}-both", major, (PROGRAM, SERVER))
    return _program(root), _program(root, SERVER)


def driver_root(major: str) -> Path:
    """A folder laid out as a driver root, with the program at `usr/bin`. Raises MpsBinaryMissing."""
    return control_program(major).parents[2]


def _program(root: Path, name: str = PROGRAM) -> Path:
    return root / "usr" / "bin" / name


def _cached(name: str, major: str, programs: tuple[str, ...]) -> Path:
    """The driver root of that name in the cache, made on the first call."""
    root = _cache_root()
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may want it at once
        final = root / name
        if not all(_program(final, each).exists() for each in programs):
            scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                unpacked = unpack(PACKAGE, SUITES[major], "non-free", scratch)
                for each in programs:
                    _lay_out(unpacked, scratch / "root", each)
                shutil.rmtree(final, ignore_errors=True)
                (scratch / "root").rename(final)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return final


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base) / "gpu-node-agent" / "mps"
    root.mkdir(parents=True, exist_ok=True)
    return root


def unpack(package: str, suite: str, component: str, scratch: Path) -> Path:
    """Fetch a Debian package into `scratch` and unpack it; the folder. Raises MpsBinaryMissing."""
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise MpsBinaryMissing(
                f"{command} is missing: these tests take {package} from Debian's packages; "
                "run them on Debian, or on an image derived from it"
            )
    listing = scratch / "own.sources"
    listing.write_text(
        f"Types: deb\nURIs: {_archive()}\nSuites: {suite}\nComponents: {component}\nSigned-By: {KEYRING}\n"
    )
    options = {
        "Dir::Etc::sourcelist": listing,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "root",
        "APT::Get::List-Cleanup": "0",
        "Acquire::Retries": "3",
    }
    for part in ("lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    apt = ["apt-get", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    _run([*apt, "update", "-q"], scratch)
    _run([*apt, "download", "-q", f"{package}/{suite}"], scratch)
    (archive,) = scratch.glob("*.deb")
    _run(["dpkg-deb", "-x", str(archive), str(scratch / "unpacked")], scratch)
    return scratch / "unpacked"


def _lay_out(unpacked: Path, root: Path, name: str) -> None:
    found = sorted(path for path in unpacked.rglob(name) if path.is_file() and not path.is_symlink())
    if not found:
        raise MpsBinaryMissing(f"{PACKAGE} holds no {name}")
    program = _program(root, name)
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(found[0], program)
    program.chmod(0o755)


def _archive() -> str:
    """The Debian archive that this machine uses, mirror or not."""
    for file in SOURCES:
        if file.exists():
            addresses: list[str] = re.findall(r"https?://[^\s\]]+", file.read_text())
            for address in addresses:
                if address.rstrip("/").endswith("/debian"):
                    return address
    raise MpsBinaryMissing(
        f"none of {', '.join(map(str, SOURCES))} names a Debian archive to take packages from"
    )


def _run(argv: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MpsBinaryMissing(f"{argv[0]} took longer than {FETCH_SECONDS} s for {argv[-1]}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise MpsBinaryMissing(f"{argv[0]} failed at {argv[-1]}: {' / '.join(said[-3:])}")


if __name__ == "__main__":
    for version in SUITES:
        print(version, control_program(version))
