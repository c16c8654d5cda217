"""The folder of each container's limits: `<run>/limits/<key>/{about.json,limits,usage}`.

The key is made of the units that the container holds, which are its alone while it lives, and which the
kubelet's record shows again after a restart of the agent. Of a folder containers see two files only, each
mounted by itself: `limits` read-only, `usage` as their own. Nothing that they can write is trusted: no path
is followed, nothing is mapped, and a usage region that was made longer is cut back. Both files stay open here
(`agent.vgpu.held`), so that their container cannot shut the agent out. All of it blocks.
"""

import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agent.kit import trees
from agent.kit.selinux import label_for_pods
from agent.model.ids import SEPARATOR
from agent.model.metadata import Metadata
from agent.model.pod import Pod
from agent.vgpu import layout
from agent.vgpu.held import REFUSALS, HeldFiles, opened
from agent.vgpu.isolation_errors import AccessRefused, BadLayout, FolderUnusable
from agent.vgpu.layout import CountedUsage, DeviceLimits
from agent.vgpu.loaded import Entries

FOLDER = "limits"
ABOUT, LIMITS, USAGE = "about.json", "limits", "usage"
LONGEST_ABOUT = 256 << 10  # thousands of IDs
# Containers have `limits` by a read-only mount. Its owner may write: an agent without capabilities may not
# otherwise.
MODES = {LIMITS: 0o644, USAGE: 0o666}
PERCENT = 100  # of the units that shares are written in


class Place(NamedTuple):
    """A container of a pod on a GPU; also the labels of its metrics."""

    namespace: str
    pod: str
    container: str
    gpu: str  # UUID


class About(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=False):
    """The container of a folder, as the record of the kubelet does not show it."""

    uid: str  # of the pod
    namespace: str
    pod: str
    container: str
    gpu: str  # UUID
    ids: tuple[str, ...]  # units of memory that the kubelet handed out
    memory_bytes: int  # the cap
    cores: int  # percent of the GPU; 0: no claim
    policy: str = ""  # at its admission; empty: it is being admitted
    build: str = ""  # of the library; empty: none is shown to the container
    grown: tuple[str, ...] = ()  # units beside those of the kubelet, which has no word for them
    avoidable: tuple[str, ...] = ()  # how its pod could get around the limits, each in words
    driver: bool = False  # whether the driver itself is to hold the container to its cap
    compute: bool = False  # whether it is held to a share of compute
    cores_cap: int | None = None  # percent that it was resized to; None: what it asked for
    grown_cores: tuple[str, ...] = ()  # units beside those of the kubelet, as `grown`

    @property
    def owner(self) -> Pod:
        """Its pod, as far as reports to the owner need it."""
        return Pod(Metadata(self.pod, self.namespace, self.uid))

    @property
    def pod_key(self) -> str:
        """Namespace and name of its pod, for the log."""
        return f"{self.namespace}/{self.pod}"

    @property
    def place(self) -> Place:
        return Place(self.namespace, self.pod, self.container, self.gpu)

    @property
    def cores_now(self) -> int:
        """Percent of the GPU that it is promised."""
        return self.cores if self.cores_cap is None else self.cores_cap


def key_of(ids: Collection[str]) -> str:
    """The folder of the container that holds these units; all are on one GPU."""
    units = sorted(ids)
    digest = hashlib.sha256("\n".join(units).encode()).hexdigest()[:24]
    return f"{units[0].partition(SEPARATOR)[0]}-{digest}"


class LimitFolders:
    def __init__(self, run: Path) -> None:
        self.root = run / FOLDER
        self.held = HeldFiles()
        self._changing = threading.Lock()  # one change of limits at a time: each reads what it changes

    def prepare(self) -> None:
        """Make the root, and remove what an agent that was killed had begun. Raises FolderUnusable."""
        with _problem_of(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            with trees.opened(self.root) as root:
                for name in trees.names(root):
                    if name.startswith("."):
                        trees.remove(root, name)

    def keys(self) -> list[str]:
        """Folders that are there. Raises FolderUnusable."""
        with _problem_of(self.root), trees.opened(self.root) as root:
            return sorted(name for name in trees.names(root) if not name.startswith("."))

    def path(self, key: str, name: str) -> Path:
        """A file of a folder, by the path that it has here and on the host."""
        return self.root / key / name

    def create(self, about: About, context_bytes: int = 0) -> str:
        """Make a container's folder whole, or not at all; the key. Raises FolderUnusable.

        One that another pod left behind gives way: a container that had it mounted keeps the old files.
        """
        key, scratch = key_of(about.ids), f".{secrets.token_hex(8)}"
        limits = _limits(about, context_bytes)
        with _problem_of(self.root / key), trees.opened(self.root) as root:
            os.mkdir(scratch, 0o700, dir_fd=root)
            try:
                folder = os.open(scratch, trees.FOLDER, dir_fd=root)
                try:
                    _write(folder, ABOUT, msgspec.json.encode(about), 0o600)
                    _write(folder, LIMITS, limits, MODES[LIMITS])
                    # Sparse: its pages are the container's memory, not the agent's.
                    _write(folder, USAGE, layout.usage_head(1), MODES[USAGE], layout.USAGE_BYTES)
                    inner = self.root / scratch
                    if problem := label_for_pods(inner, inner / LIMITS, inner / USAGE):
                        raise FolderUnusable(problem)
                    trees.remove(root, key)
                    os.rename(scratch, key, src_dir_fd=root, dst_dir_fd=root)
                    # Once its folder is gone nobody keeps files of the one before.
                    self.held.drop(key)
                    self._hold(folder, key)
                finally:
                    os.close(folder)
            except BaseException:
                trees.remove(root, scratch)
                raise
        return key

    def hold(self, key: str) -> None:
        """Have both files of a container open. Raises FolderUnusable."""
        if not self.held.has(key, MODES):
            with self._folder(key) as folder:
                self._hold(folder, key)

    def about(self, key: str) -> About:
        """The container of a folder. Raises FolderUnusable."""
        with self._file(key, ABOUT) as file:
            content = os.pread(file, LONGEST_ABOUT, 0)
        try:
            found = msgspec.json.decode(content, type=About)
        except msgspec.MsgspecError as error:
            raise FolderUnusable(f"{self.path(key, ABOUT)} cannot be understood: {error}") from error
        if not found.ids or key_of(found.ids) != key:
            raise FolderUnusable(f"{self.path(key, ABOUT)} is of other units than its folder")
        return found

    def limits(self, key: str) -> DeviceLimits:
        """The limits in force. Raises FolderUnusable."""
        with self._file(key, LIMITS) as file:
            return layout.read_limits(os.pread(file, layout.LIMITS_BYTES, 0))[0]

    def change(self, key: str, **values: Any) -> None:  # noqa: ANN401  fields of DeviceLimits
        """Change limits, in the very file that the container has mounted. Raises FolderUnusable."""
        with self._changing, self._file(key, LIMITS) as file:
            now = layout.read_limits(os.pread(file, layout.LIMITS_BYTES, 0))[0]
            layout.write_limits(file, 0, replace(now, **values))

    def resize(self, key: str, about: About) -> None:
        """Give a container another cap. Raises FolderUnusable.

        What the folder says of units comes first: an agent that is killed in between finds them there.
        """
        with self._folder(key) as folder, trees.replacing(folder, ABOUT) as scratch:
            _write(folder, scratch, msgspec.json.encode(about), 0o600)
        self.change(key, memory_bytes=about.memory_bytes)

    def beat(self, key: str) -> None:
        """See `layout.beat`. Raises FolderUnusable."""
        with self._file(key, LIMITS) as file:
            layout.beat(file)

    def bound(self, key: str) -> bool:
        """Cut a usage region back; whether its container had made it longer. Raises FolderUnusable."""
        with self._file(key, USAGE) as file:
            longer = os.fstat(file).st_size > layout.USAGE_BYTES
            if longer:
                os.ftruncate(file, layout.USAGE_BYTES)
        return longer

    def mend(self, key: str, about: About) -> None:
        """Write a limit file again that cannot be read, in its place. Raises FolderUnusable."""
        with self._file(key, LIMITS) as file:
            os.pwrite(file, _limits(about), 0)
            os.ftruncate(file, layout.LIMITS_BYTES)

    def usage(self, key: str) -> CountedUsage | None:
        """The container's use by the library's word; None: the region cannot be read. A hint.

        Raises FolderUnusable.
        """
        with self._file(key, USAGE) as file, suppress(BadLayout):
            return layout.read_usage(os.pread(file, layout.usage_head_bytes(1), 0))[0]
        return None

    def open_usage(self, key: str) -> int:
        """A descriptor by which a usage region can be read again and again. Raises FolderUnusable."""
        with self._file(key, USAGE) as file:
            return os.dup(file)

    def sole_process(self, key: str, total_bytes: int) -> tuple[int, int] | None:
        """The container's only process by the library's word: bytes charged, and those for contexts.

        None: it has several, or what is there says nothing. A hint. Raises FolderUnusable.
        """
        with self._file(key, USAGE) as file:
            slots = os.pread(file, layout.READ_SLOTS * layout.SLOT_BYTES, layout.SLOTS_AT)
        return layout.sole_process(slots, total_bytes)

    def entries(self, key: str) -> Entries:
        """The processes that say of themselves that they have the library. A hint. Raises FolderUnusable."""
        with self._file(key, USAGE) as file:
            return layout.read_entries(os.pread(file, layout.SLOTS * layout.SLOT_BYTES, layout.SLOTS_AT))

    def remove(self, key: str) -> None:
        """Remove a folder; there may be none. Raises FolderUnusable."""
        with _problem_of(self.root / key), trees.opened(self.root) as root:
            trees.remove(root, key)
        self.held.drop(key)

    @contextmanager
    def _folder(self, key: str) -> Iterator[int]:
        with _problem_of(self.root / key), trees.opened(self.root) as root:
            folder = os.open(key, trees.FOLDER, dir_fd=root)
            try:
                yield folder
            finally:
                os.close(folder)

    @contextmanager
    def _file(self, key: str, name: str) -> Iterator[int]:
        """A file of a folder, open. Raises FolderUnusable, also where its reader finds a BadLayout.

        AccessRefused is one: the file's container keeps the agent from it.
        """
        with self._folder(key) as folder:
            descriptor = self._descriptor(folder, key, name)
            try:
                yield descriptor
            except BadLayout as error:
                raise FolderUnusable(f"{self.path(key, name)}: {error}") from error
            finally:
                os.close(descriptor)

    def _hold(self, folder: int, key: str) -> None:
        """Each is asked for, whatever the others do: leases on several files are waited for at once."""
        failed: OSError | AccessRefused | None = None
        for name in MODES:
            try:
                os.close(self._descriptor(folder, key, name))
            except (OSError, AccessRefused) as error:
                failed = failed or error
        if failed:
            raise failed

    def _descriptor(self, folder: int, key: str, name: str) -> int:
        if name not in MODES:  # no container has it
            return opened(folder, name, os.O_RDONLY)
        try:
            return self.held.get(key, name, folder, os.O_RDWR, MODES[name])
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            raise AccessRefused(f"{self.path(key, name)} is kept from the agent: {error.strerror}") from error


def _limits(about: About, context_bytes: int = 0) -> bytes:
    limits = DeviceLimits(
        about.gpu,
        about.memory_bytes,
        about.cores,
        context_bytes=context_bytes,
        strict=about.policy == "strict",
        driver=about.driver,
        compute=about.compute,
        share=about.cores_now * PERCENT if about.compute else 0,
    )
    return layout.limit_file(key_of(about.ids), (limits,))


@contextmanager
def _problem_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderUnusable(
            f"{path}: limits cannot be kept there: {error.strerror or error}; free space in the agent's run "
            "folder, or set vgpu.enforcement to report"
        ) from error


def _write(folder: int, name: str, content: bytes, mode: int, size: int = 0) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        if size:
            os.ftruncate(descriptor, size)
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, "it was written in part: the file system is full")
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
