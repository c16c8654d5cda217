"""Starts a control daemon so that it outlives the process that starts it. Run as a program.

Argument: an order as JSON. It leads a session of its own already (`agent.kit.programs`). In turn: a cgroup of
its own in every hierarchy (what ends a container kills what is in its cgroup), a private mount namespace in
which the GPU's shared-memory folder is /dev/shm and a folder that no pod sees lies over the pipe folder, the
driver's root, and the program, which goes into the background by itself. Its exit code is this program's.
Standard output gets one line of JSON first: what could not be had, by name.
"""

# pathlib takes longer to import than all the rest of this.
# ruff: noqa: PTH103, PTH110, PTH118, PTH120, PTH121, PTH123

import ctypes
import errno
import json
import os
import sys
from typing import Any

TRIES = 5
CLONE_NEWNS = 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_REMOUNT, MS_NOSUID, MS_NODEV, MS_NOSYMFOLLOW = 0x20, 0x2, 0x4, 0x100
# What pods write to: device nodes and links there are of no use. The last since Linux 5.10, else passed over.
TENANTS = MS_NOSUID | MS_NODEV | MS_NOSYMFOLLOW
SHARED_MEMORY = "/dev/shm"  # noqa: S108  where libcuda looks


def main(order: dict[str, Any]) -> None:
    """Start the daemon as ordered; never returns."""
    problems: dict[str, str] = {}
    for folder in order["cgroups"]:
        try:
            join(folder)
        except OSError as error:
            problems.setdefault("cgroup", f"{folder}: {error.strerror}")
    root = order["root"]
    try:
        private_mounts(root, order["folder"], {SHARED_MEMORY: order["shm"], order["pipe"]: order["own"]})
    except OSError as error:
        problems["namespace"] = str(error)
        # As root it would open by their names what pods can write to.
        if root != "/" or os.geteuid() == 0:
            print(json.dumps(problems), flush=True)
            sys.exit(f"no private mount namespace: {error}; the agent must run privileged (CAP_SYS_ADMIN)")
    print(json.dumps(problems), flush=True)
    if root != "/":
        os.chroot(root)
    os.chdir("/")
    os.execve(order["program"], [order["program"], *order["arguments"]], order["environment"])  # noqa: S606


def join(folder: str) -> None:
    """Move this process into a cgroup, made if absent."""
    for _ in range(TRIES):
        try:
            return enter(folder)
        except OSError as error:
            # The last daemon of another GPU ended, and its agent took the empty cgroup away.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
    return enter(folder)


def enter(folder: str) -> None:
    """One try of that. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    parent = os.path.dirname(folder)
    # On v1 a new cpuset admits no process until it is given what its parent has.
    for name in ("cpuset.cpus", "cpuset.mems"):
        path = os.path.join(folder, name)
        if os.path.exists(path) and not os.path.exists(os.path.join(folder, "cgroup.controllers")):
            with open(os.path.join(parent, name)) as source, open(path, "w") as target:
                target.write(source.read())
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write(str(os.getpid()))


def private_mounts(root: str, folder: str, over: dict[str, str]) -> None:
    """Enter a mount namespace of our own with `folder` seen inside `root`, and the folders of `over` (path
    inside `root`: path outside) lying over others.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        failed("unshare")
    mount(libc, None, "/", MS_REC | MS_PRIVATE)
    top = root.rstrip("/")
    inside = top + folder
    if root != "/" and not (os.path.exists(inside) and os.path.samefile(folder, inside)):
        os.makedirs(inside, exist_ok=True)
        mount(libc, folder, inside, MS_BIND | MS_REC)
    for target, source in over.items():
        mount(libc, source, top + target, MS_BIND)
        mount(libc, None, top + target, MS_REMOUNT | MS_BIND | TENANTS)


def mount(libc: ctypes.CDLL, source: str | None, target: str, flags: int) -> None:
    if libc.mount(source.encode() if source else None, target.encode(), None, ctypes.c_ulong(flags), None):
        failed(f"mount {source or ''} {target}")


def failed(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
