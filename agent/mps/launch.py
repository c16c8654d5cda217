"""Starting and clearing up around one control daemon: mounts, cgroups, the launcher."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agent.model.cgroup import MPS_CGROUP
from agent.mps import launcher
from agent.mps import shared_memory as shm
from agent.mps.binary import Program
from agent.mps.directories import SOCKETS, Directories
from agent.mps.mps_errors import StartFailed

CGROUP = MPS_CGROUP
START_SECONDS = 10.0
SOCKET_SECONDS = 5.0  # after the program went into the background, where it does so before it listens
POLL_SECONDS = 0.01
MULTI_USER = "-multiuser-server"
# What a version without the flag says: up to driver 550 it takes any further argument for a request to be a
# client, since 580 it explains its usage and ends with 0.
NO_SUCH_FLAG = ("cannot find mps control daemon", "unrecognized option")
# Since driver 580 the daemon itself loads libcuda, and without it ends so, saying nothing: CUDA error 500.
NO_LIBRARY = 500 & 0xFF


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
    shared_memory: int,
    multi_user: bool | None,
) -> Launched:
    """Start the daemon detached, with so many bytes of shared memory for it and its pods.

    `multi_user` None: find out whether it has the flag. Raises StartFailed, BadFolder.
    """
    problems: dict[str, str] = {}
    if problem := await anyio.to_thread.run_sync(shm.prepare, folders, shared_memory):
        problems["tmpfs"] = problem
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
        # One that never listens is reported by the next probe.
        while not await anyio.to_thread.run_sync(os.path.lexists, made / SOCKETS[0]):
            await anyio.sleep(POLL_SECONDS)
    await anyio.to_thread.run_sync(folders.show if private else partial(folders.take_in, "started"))


def adopt(pid: int, started: int, folders: Directories) -> bool:
    """Have the agent find the sockets of a running daemon, and pods too. Whether it has their /dev/shm.

    `started` distinguishes it from another of the same PID. Blocks. Raises BadFolder.
    """
    if exposed(pid, folders):
        folders.take_in(f"{pid} {started}")
    else:
        folders.show()
    return shm.private(pid, folders)


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
