"""Traces of a cluster on the host outside its namespace, written down so that anyone can undo them.

Every cluster has a folder `<STATE>/<name>` with a record in it: the process that owns it and process 1 of its
namespace. A cluster whose owner is dead is a leftover: the next start, or its reaper, removes it. What
clusters share (kernel settings changed by the kubelet, mount points made for it) is undone with the last.
"""

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.processes import Identity, alive, send, wait_gone
from tests.cluster.waiting import RigError

STATE = Path("/var/tmp/gna-test")
"""Short, because unix sockets lie below it (107 bytes at most), and on disk, because images do too."""
CGROUPS = Path("/sys/fs/cgroup")
SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
"""Settings of the kernel that a kubelet or a container runtime may change at its start."""
MOUNT_POINTS = ("/var/lib/kubelet", "/var/log/containers", "/var/log/pods")


@dataclass(frozen=True, slots=True)
class Record:
    """One cluster, as its leftovers would be found."""

    name: str
    boot: str
    owner: Identity
    processes: tuple[Identity, ...] = field(default=())
    """Processes that end with the cluster: process 1 of its namespace, and what runs outside for it."""

    @property
    def folder(self) -> Path:
        return STATE / self.name

    @property
    def cgroup(self) -> str:
        """Name of the cluster's cgroup in every hierarchy (no leading slash)."""
        return f"gna-test-{self.name}"

    def write(self) -> None:
        """Write the record in one step, so that no reader meets half of it."""
        scratch = self.folder / "record.new"
        scratch.write_text(json.dumps(asdict(self)))
        scratch.rename(self.folder / "record.json")


def boot_id() -> str:
    """Changes at every boot; pids and mounts of another boot are gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def hierarchies() -> list[Path]:
    """Root of every cgroup hierarchy that is mounted: one on v2, one per controller on v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(mount[1]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]


@contextmanager
def locked() -> Iterator[None]:
    """No cluster on this machine starts, ends or is swept meanwhile."""
    path = STATE / "lock"
    while True:
        STATE.mkdir(mode=0o711, exist_ok=True)
        with suppress(FileNotFoundError), path.open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The last cluster removes the lock with the folder: a lock on a removed file is none.
            if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                try:
                    yield
                finally:
                    if sorted(entry.name for entry in STATE.iterdir()) == ["lock"]:
                        path.unlink()
                        STATE.rmdir()
                return


def claim(record: Record) -> None:
    """Make folder, cgroups and mount points of a new cluster; leftovers of dead ones are swept first."""
    with locked():
        _sweep_dead()
        record.folder.mkdir(mode=0o711)
        record.write()
        _remember_shared()
        make_cgroup(record.cgroup)


def make_cgroup(name: str) -> None:
    """Make a cgroup in every hierarchy; one below a cluster's own goes with it."""
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        # On v1 a new cpuset is empty and admits no process until it is given what its parent has.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (group / setting).exists() and not (CGROUPS / "cgroup.controllers").exists():
                (group / setting).write_text((group.parent / setting).read_text())


def release(record: Record) -> None:
    """Undo a cluster: processes, cgroups, folder; with the last cluster also what they share."""
    with locked():
        _remove(record)
        _restore_shared()


def sweep() -> list[str]:
    """Undo every cluster whose owner is dead; return their names."""
    if not STATE.exists():
        return []
    with locked():
        return sweep_locked()


def sweep_locked() -> list[str]:
    """The same for somebody who holds the lock."""
    names = _sweep_dead()
    _restore_shared()
    return names


def records() -> list[Record]:
    """Every cluster that is written down, dead or alive."""
    found = []
    for path in STATE.glob("*/record.json"):
        with suppress(FileNotFoundError, ValueError, KeyError):
            data: dict[str, Any] = json.loads(path.read_text())
            processes = tuple(Identity(**item) for item in data["processes"])
            found.append(Record(data["name"], data["boot"], Identity(**data["owner"]), processes))
    return found


def _sweep_dead() -> list[str]:
    dead = [record for record in records() if record.boot != boot_id() or not alive(record.owner)]
    for record in dead:
        _remove(record)
    return [record.name for record in dead]


def _remove(record: Record) -> None:
    same_boot = record.boot == boot_id()
    if same_boot:
        for process in record.processes:
            send(process, signal.SIGKILL)
        if not wait_gone(record.processes, 10):
            raise RigError(f"cluster {record.name}: its processes do not die: {record.processes}")
        _remove_cgroups(record.cgroup)
    shutil.rmtree(record.folder, ignore_errors=True)
    if record.folder.exists():
        raise RigError(f"cluster {record.name}: {record.folder} cannot be removed; look for mounts below it")


def _remove_cgroups(name: str) -> None:
    for hierarchy in hierarchies():
        top = hierarchy / name
        if not top.exists():
            continue
        deadline = time.monotonic() + 10
        # A killed process leaves its cgroup only once it is reaped, so the first try may find it busy.
        while not _remove_tree_of_cgroups(top):
            if time.monotonic() > deadline:
                raise RigError(f"cgroup {top} is still in use")
            time.sleep(0.02)


def _remove_tree_of_cgroups(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            Path(folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _remember_shared() -> None:
    """Once, before the first cluster changes anything."""
    path = STATE / "host.json"
    if path.exists() and json.loads(path.read_text())["boot"] == boot_id():
        return
    readable = [name for name in SYSCTLS if os.access(Path("/proc/sys") / name, os.R_OK)]
    settings = {name: (Path("/proc/sys") / name).read_text() for name in readable}
    made = [point for point in MOUNT_POINTS if not Path(point).exists()]
    path.write_text(json.dumps({"boot": boot_id(), "settings": settings, "made": made}))
    for point in made:
        Path(point).mkdir(parents=True)


def _restore_shared() -> None:
    path = STATE / "host.json"
    # Any record counts here, even one that another version of this code wrote and `records` cannot read.
    if any(STATE.glob("*/record.json")) or not path.exists():
        return
    before = json.loads(path.read_text())
    if before["boot"] == boot_id():
        for name, value in before["settings"].items():
            setting = Path("/proc/sys") / name
            if setting.read_text() != value:
                setting.write_text(value)
    for point in before["made"]:
        # Removing a mount point would take away the mount of anybody who uses it in a namespace of his own.
        if not _is_mount_point_anywhere(point):
            with suppress(OSError):  # not ours any more when something else lies in it
                Path(point).rmdir()
    path.unlink()


def _is_mount_point_anywhere(path: str) -> bool:
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):  # the process may end while its table is read
            if any(line.split(" ", 5)[4] == path for line in table.read_text().splitlines()):
                return True
    return False
