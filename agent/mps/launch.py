"""Starting and clearing up around one control daemon: mounts, cgroups, the launcher."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from agent.mps import launcher
from agent.mps.binary import Program
from agent.mps.directories import SOCKETS, Directories
from agent.mps.errors import StartFailed

CGROUP = "gpu-node-agent-mps"
START_SECONDS = 10.0
SOCKET_SECONDS = 5.0  # after the program went into the background, where it does so before it listens
POLL_SECONDS = 0.01
MNT_DETACH = 2
MULTI_USER = "-multiuser-server"
# What a version without the flag says: up to driver 550 it takes any further argument for a wish to be a
# client, since 580 it explains its usage and ends with 0.
NO_SUCH_FLAG = ("cannot find mps control daemon", "unrecognized option")
# Since driver 580 the daemon itself loads libcuda, and without it ends so, saying nothing: CUDA error 500.
NO_LIBRARY = 500 & 0xFF

SharedMemory = Literal["auto", "tmpfs", "directory"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A daemon went into the background. `problems` name what it had to do without."""

    multi_user: bool
    problems: Mapping[str, str]
    flag_known: bool = True  # False: it failed with the flag in words that do not say that it lacks it


async def launch(
    program: Program,
    folders: Directories,
    environment: Mapping[str, str],
    cgroups: Path,
    shared_memory: SharedMemory,
    multi_user: bool | None,
) -> Launched:
    """Start the daemon detached. `multi_user` None: find out whether it has the flag. Raises StartFailed."""
    problems = dict(await anyio.to_thread.run_sync(prepare_shared_memory, folders, shared_memory))
    if problem := await anyio.to_thread.run_sync(folders.label):
        problems["selinux"] = problem
    known = True
    for flagged in (True, False) if multi_user is None else (multi_user,):
        order = {
            "program": program.inner,
            "arguments": ["-d", MULTI_USER] if flagged else ["-d"],
            "environment": dict(environment),
            "root": str(program.root),
            "folder": str(folders.root),
            "own": str(folders.own),
            "pipe": str(folders.pipe),
            "shm": str(folders.shm),
            "cgroups": [
                str(folder / CGROUP) for folder in await anyio.to_thread.run_sync(hierarchies, cgroups)
            ],
        }
        code, out, complaint = await _run(order)
        lacks_flag = any(words in f"{out} {complaint}".lower() for words in NO_SUCH_FLAG)
        if code == 0 and not lacks_flag:
            problems |= _problems(out)
            await _shown(folders, private="namespace" not in problems)
            return Launched(flagged, problems, known)
        # Whatever a version says to a flag that it lacks: what is wrong besides shows without the flag, too.
        known = lacks_flag
    said = complaint or "it said nothing"
    if code == NO_LIBRARY:
        said += (
            ", as it does where it finds no libcuda.so.1: have the driver's libraries beside the program, in "
            "the driver root or known to the loader"
        )
    raise StartFailed(f"{program.path} -d ended with {code}: {said}; see {folders.log}/control.log")


async def _shown(folders: Directories, private: bool) -> None:
    """Have pods, or the agent, find the sockets of a daemon that was started now. Raises BadFolder."""
    made = folders.own if private else folders.pipe
    with anyio.move_on_after(SOCKET_SECONDS):
        # One that never listens is told of by whoever asks it next.
        while not await anyio.to_thread.run_sync(os.path.lexists, made / SOCKETS[0]):
            await anyio.sleep(POLL_SECONDS)
    await anyio.to_thread.run_sync(folders.show if private else partial(folders.take_in, "started"))


def adopt(pid: int, started: int, folders: Directories) -> bool:
    """Have the agent find the sockets of a running daemon, and pods too. Whether it has their /dev/shm.

    `started` tells it from another of the same PID. Blocks. Raises BadFolder.
    """
    if exposed(pid, folders):
        folders.take_in(f"{pid} {started}")
    else:
        folders.show()
    return private_shared_memory(pid, folders)


def exposed(pid: int, folders: Directories) -> bool:
    """Whether a running daemon works in the folder that pods mount. Blocks."""
    try:
        seen = os.stat(f"/proc/{pid}/root{folders.pipe}")  # noqa: PTH116  the root is the daemon's
        return not os.path.samestat(seen, folders.own.stat())
    except FileNotFoundError:
        return not folders.own.exists() and folders.pipe.exists()


async def _run(order: Mapping[str, object]) -> tuple[int | None, str, str]:
    # -I and -S: nothing of the environment or of installed packages is read, which halves the start.
    command = [sys.executable, "-I", "-S", launcher.__file__, json.dumps(order)]
    with anyio.move_on_after(START_SECONDS):
        done = await anyio.run_process(command, check=False, stdin=subprocess.DEVNULL, env={}, cwd="/")
        texts = (done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        return done.returncode, texts[0], " ".join(texts[1].split())
    return None, "", f"it did not go into the background within {START_SECONDS:g} s"


def _problems(out: str) -> Mapping[str, str]:
    try:
        found = json.loads(out.splitlines()[0])
    except (ValueError, IndexError):
        return {}
    return {str(key): str(value) for key, value in found.items()}


def hierarchies(cgroups: Path) -> tuple[Path, ...]:
    """Roots of the cgroup hierarchies: one on v2, one per controller on v1. Blocks."""
    if (cgroups / "cgroup.controllers").exists():
        return (cgroups,)
    if not cgroups.is_dir():
        return ()
    return tuple(
        sorted(
            folder
            for folder in cgroups.iterdir()
            if not folder.is_symlink() and (folder / "cgroup.procs").exists()
        )
    )


def leave_no_cgroup(cgroups: Path) -> None:
    """Remove the daemons' cgroup where nobody is in it any more. Blocks."""
    for folder in hierarchies(cgroups):
        try:
            (folder / CGROUP).rmdir()
        except OSError:
            continue  # another GPU's daemon is in it, or there is none


def prepare_shared_memory(folders: Directories, wish: SharedMemory) -> Mapping[str, str]:
    """Put a tmpfs of its own at the shm folder where pods would see it, too. Blocks. Raises StartFailed."""
    if wish == "directory" or folders.shm.is_mount():
        return {}
    problem = _mount_tmpfs(folders.shm)
    if problem is None and wish == "auto" and not _seen_by_host(folders.shm):
        unmount(folders.shm)
        problem = (
            "mounts made here do not reach the host: give the run folder mountPropagation Bidirectional "
            "for a tmpfs of its own"
        )
    if problem is None:
        return {}
    if wish == "tmpfs":
        raise StartFailed(f"{folders.shm}: mps.sharedMemory asks for a tmpfs, but {problem}")
    folders.shm.chmod(0o1777)
    return {"tmpfs": problem}


def unmount(folder: Path) -> None:
    """Take a mount away, if there is one, even while a pod still holds it. Blocks."""
    if folder.is_mount():
        ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(folder), MNT_DETACH)


def private_shared_memory(pid: int, folders: Directories) -> bool:
    """Whether a running daemon has the shm folder as its /dev/shm. Blocks."""
    try:
        return os.path.samefile(f"/proc/{pid}/root/dev/shm", folders.shm)  # noqa: PTH121
    except OSError:
        return False


def _mount_tmpfs(folder: Path) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    # nosuid and nodev, as /dev/shm has everywhere; the size stays at the kernel's half of memory.
    flags = ctypes.c_ulong(0x2 | 0x4)
    if libc.mount(b"gpu-node-agent", os.fsencode(folder), b"tmpfs", flags, b"mode=1777"):
        return f"it cannot be mounted: {os.strerror(ctypes.get_errno())}"
    return None


def _seen_by_host(folder: Path) -> bool:
    """Whether the container runtime sees mounts made here: our namespace is its, or passes them on."""
    try:
        if os.path.samefile("/proc/self/ns/mnt", "/proc/1/ns/mnt"):  # noqa: PTH121
            return True
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
            for line in mounts:
                before, _, _ = line.partition(" - ")
                words = before.split()
                if words[4] == str(folder):
                    return any(word.startswith("shared:") for word in words[6:])
    except OSError:
        return False
    return False
