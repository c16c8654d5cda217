"""A process in a vGPU container: root, in a mount namespace with the files that the agent gives a container.

`tenant.py <mounts> <capabilities, a mask>`, with mounts as JSON: path inside to path on the host, and whether
it is read-only. Commanded by lines of JSON, each an expression over the functions below, as
`tests/cuda_double/program.py` sends them.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, BIND, REMOUNT, READ_ONLY, RECURSIVE, PRIVATE = 0x20000, 0x1000, 0x20, 1, 0x4000, 0x40000
CAPABILITY_VERSION = 0x20080522
ADD_SEALS, ALL_SEALS = 1033, 0x1F
MIB = 1 << 20
kept: list[Any] = []  # what an attempt holds until it is over
leases: dict[int, int] = {}
pids: list[int] = []


def called(answer: int, what: str) -> None:
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, flags: int, kind: str | None = None, options: str | None = None) -> None:
    words = [each.encode() if each else None for each in (source, target, kind, options)]
    called(LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def enter(mounts: dict[str, tuple[str, bool]], capabilities: int) -> None:
    """Be in a container: its own folders, the agent's files, and no other capabilities than these."""
    called(LIBC.unshare(NEWNS), "unshare")
    mount("none", "/", RECURSIVE | PRIVATE)
    mount("tmpfs", "/mnt", 0, "tmpfs")
    for number, folder in enumerate(("/etc", "/usr/lib")):
        above, work = f"/mnt/above-{number}", f"/mnt/work-{number}"
        Path(above).mkdir()
        Path(work).mkdir()
        mount("overlay", folder, 0, "overlay", f"lowerdir={folder},upperdir={above},workdir={work}")
    for path in mounts:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
    for path, (host, read_only) in mounts.items():
        mount(host, path, BIND)
        if read_only:
            mount("none", path, BIND | REMOUNT | READ_ONLY)
    for number in range(64):
        if not capabilities >> number & 1:
            LIBC.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP: nor has what it executes
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    sets = struct.pack("<6I", low, low, 0, high, high, 0)
    called(LIBC.capset(header, sets), "capset")


def start() -> float:
    """How many seconds a program takes to start, with the library where the preload file names it."""
    began = time.monotonic()
    done = subprocess.run(["/bin/true"], stderr=subprocess.PIPE, timeout=60, check=True)
    assert not done.stderr, done.stderr
    return time.monotonic() - began


def reads(path: str) -> int:
    with Path(path).open("rb") as file:
        return len(file.read())


def watch(path: str) -> int:
    """Watch a file for being opened."""
    watched = int(LIBC.inotify_init1(os.O_NONBLOCK))
    kept.append(watched)
    called(LIBC.inotify_add_watch(watched, path.encode(), 0x20), "inotify_add_watch")
    return watched


def seen(watched: int) -> int:
    try:
        return len(os.read(watched, 4096))
    except BlockingIOError:
        return 0


def lease(path: str, kind: int, flags: int, seconds: float) -> bool:
    """Whether a lease was had within some seconds; from then on it is taken again whenever it breaks."""
    file = os.open(path, flags)
    kept.append(file)
    if take(file, kind, seconds):
        leases[file] = kind
    return file in leases


def take(file: int, kind: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, kind)
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        else:
            return True


def broken(*_: object) -> None:
    """Let go of each lease that somebody breaks, and take it again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    for file, kind in leases.items():
        if fcntl.fcntl(file, fcntl.F_GETLEASE) != kind:
            with suppress(OSError):  # the kernel has ended it
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            take(file, kind, 0.2)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})


def write_lease(path: str) -> bool:
    try:
        return lease(path, fcntl.F_WRLCK, os.O_RDWR, 0.02)
    except OSError:
        return lease(path, fcntl.F_WRLCK, os.O_RDONLY, 0.02)


def read_lease(path: str) -> bool:
    return lease(path, fcntl.F_RDLCK, os.O_RDONLY, 0.02)


def seal(path: str) -> None:
    file = os.open(path, os.O_RDWR)
    kept.append(file)
    fcntl.fcntl(file, ADD_SEALS, ALL_SEALS)


def acl(path: str) -> None:
    """Nobody may do anything by a list: its owner, a user, its group, all by the mask, and others."""
    entries = [(1, 0, -1), (2, 7, 65534), (4, 0, -1), (0x10, 7, -1), (0x20, 0, -1)]
    packed = b"".join(struct.pack("<HHi", *each) for each in entries)
    os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)


def close(path: str) -> None:
    Path(path).chmod(0)


def give_away(path: str) -> None:
    os.chown(path, 65534, 65534)
    Path(path).chmod(0)


def execute(path: str) -> None:
    """Have the file be a program that runs."""
    program = Path("/bin/sleep").read_bytes()
    with Path(path).open("r+b", buffering=0) as file:
        file.write(program)
    Path(path).chmod(0o777)
    pids.append(os.posix_spawn(path, ["sleep", "600"], {}))
    if Path(f"/proc/{pids[-1]}/exe").stat().st_ino != Path(path).stat().st_ino:
        raise OSError(errno.ENOEXEC, "it was not executed")


def map_it(path: str) -> None:
    try:
        file, access = os.open(path, os.O_RDWR), mmap.PROT_READ | mmap.PROT_WRITE
    except OSError:
        file, access = os.open(path, os.O_RDONLY), mmap.PROT_READ
    kept.append(file)
    mapped = mmap.mmap(file, os.fstat(file).st_size, prot=access)
    kept.append(mapped)


def lock(path: str) -> None:
    try:
        file = os.open(path, os.O_RDWR)
        kept.append(file)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file = os.open(path, os.O_RDONLY)
        kept.append(file)
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def rename(path: str) -> None:
    Path(path).rename(f"{path}.other")


def link(path: str) -> None:
    os.link(path, f"{path}.other")


def remove(path: str) -> None:
    Path(path).unlink()


def fill(path: str) -> None:
    file = os.open(path, os.O_RDWR)
    kept.append(file)
    os.posix_fallocate(file, 0, 16 * MIB)


def empty(path: str) -> None:
    file = os.open(path, os.O_RDWR)
    kept.append(file)
    os.ftruncate(file, 0)


def attempt(way: str, path: str) -> str:
    """The kernel's answer to one attempt: `done`, or the name of an error."""
    try:
        done = globals()[way](path)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "EAGAIN" if done is False else "done"


def over() -> None:
    """Let go of all that attempts hold."""
    leases.clear()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    pids.clear()
    for each in kept:
        each.close() if isinstance(each, mmap.mmap) else os.close(each)
    kept.clear()


def main() -> None:
    enter(json.loads(sys.argv[1]), int(sys.argv[2], 16))
    signal.signal(signal.SIGIO, broken)
    for line in sys.stdin:
        try:
            answer = {"value": eval(json.loads(line), globals())}
        except Exception as error:  # noqa: BLE001  the test has it
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


main()
