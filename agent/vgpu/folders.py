"""The folder of each container's limits: `<run>/limits/<key>/{about.json,limits,usage}`.

So it is for files of layout 1. Those of a later one lie below `<run>/limits.v<layout>`: what a path says of
the layout holds for ever, and an agent before it, 0.2.0 included, does not touch them. A container keeps the
layout that its library was built for.

The key is made of the units that the container holds, which are its alone while it lives, and which the
kubelet's record shows again after a restart of the agent. Of a folder containers see two files only, each
mounted by itself: `limits` read-only, `usage` as their own. Nothing that they can write is trusted: no path
is followed, nothing is mapped, and a usage region that was made longer is cut back. Both files stay open here
(`agent.vgpu.layout`), so that their container cannot shut the agent out. All of it blocks.
"""

import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Self

import msgspec

from agent.kit import files as trees
from agent.kit.files import label_for_pods
from agent.model.modes import SEPARATOR
from agent.model.pod import Metadata, Pod
from agent.vgpu import layout
from agent.vgpu.isolation_errors import AccessRefused, BadLayout, FolderUnusable, OtherLayout
from agent.vgpu.layout import REFUSALS, CountedUsage, DeviceLimits, Entries, HeldFiles, opened

FOLDER = "limits"
ABOUT, LIMITS, USAGE = "about.json", "limits", "usage"
LONGEST_ABOUT = 256 << 10  # thousands of IDs
# Containers have `limits` by a read-only mount. Its owner may write: an agent without capabilities may not
# otherwise.
MODES = {LIMITS: 0o644, USAGE: 0o666}
# The two newest, each as a module with the functions of `agent.vgpu.layout`; there is only one so far.
LAYOUTS: Mapping[int, ModuleType] = MappingProxyType({layout.LAYOUT: layout})
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
    layout: int = 1  # of its files, which 0.2.0 does not say
    earlier: Mapping[str, str] = msgspec.field(default_factory=dict)  # see `with_earlier`

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
    def builds(self) -> tuple[str, ...]:
        """Of the library, that containers of its pod with these units were given."""
        return (self.build, *self.earlier.values())

    def with_earlier(self, before: Self) -> Self:
        """With the builds of other containers of its pod that had the units before it, by name.

        A plain init container hands its units on before it starts, and may be started again.
        """
        same = self.pod_key == before.pod_key  # by a watch that lags two containers may have different UIDs
        found = {**before.earlier, before.container: before.build} if same else {}
        found.pop(self.container, None)
        return msgspec.structs.replace(self, earlier=found)

    @property
    def cores_now(self) -> int:
        """Percent of the GPU that it is promised."""
        return self.cores if self.cores_cap is None else self.cores_cap


def key_of(ids: Collection[str]) -> str:
    """The folder of the container that holds these units; all are on one GPU."""
    units = sorted(ids)
    digest = hashlib.sha256("\n".join(units).encode()).hexdigest()[:24]
    return f"{units[0].partition(SEPARATOR)[0]}-{digest}"


def roots(run: Path) -> dict[int, Path]:
    """The folders of limits that there are, and that of layout 1, by layout; the newest first."""
    found = {1: run / FOLDER}
    for each in run.glob(f"{FOLDER}.v*"):
        if (number := each.name.removeprefix(f"{FOLDER}.v")).isdecimal():
            found[int(number)] = each
    return dict(sorted(found.items(), reverse=True))


class LimitFolders:
    def __init__(self, run: Path, layouts: Mapping[int, ModuleType] = LAYOUTS) -> None:
        """`layouts`: those that are served; new containers get the newest."""
        self._layouts = layouts
        self.newest = max(layouts)
        self._run = run
        self._roots = self._served()
        self._number: dict[str, int] = {}  # of the layout of a folder's files
        self.held = HeldFiles()
        self._changing = threading.Lock()  # one change of limits at a time: each reads what it changes

    def _served(self) -> dict[int, Path]:
        numbers = sorted(self._layouts, reverse=True)
        return {n: self._run / (FOLDER if n == 1 else f"{FOLDER}.v{n}") for n in numbers}

    @property
    def root(self) -> Path:
        """The folder of those of new containers."""
        return self._roots[self.newest]

    def prepare(self) -> None:
        """Make the roots, and remove what an agent that was killed had begun. Raises FolderUnusable."""
        for number in self._layouts:
            with _problem_of(self._roots[number]):
                self._roots[number].mkdir(parents=True, exist_ok=True)
                self._roots[number].chmod(0o700)
        found = {**self._served(), **roots(self._run)}
        self._roots = dict(sorted(found.items(), reverse=True))
        self._number = {}
        for number, path in self._existing():
            with _problem_of(path), trees.opened(path) as root:
                for name in trees.names(root):
                    if name.startswith("."):
                        trees.remove(root, name)
                    elif name in self._number:
                        self._choose(name, self._number[name], number)
                    else:
                        self._number[name] = number

    def _existing(self) -> list[tuple[int, Path]]:
        return [(number, path) for number, path in self._roots.items() if path.is_dir()]

    def _choose(self, key: str, newer: int, older: int) -> None:
        """Remove one of two folders of a key: an agent that does not know layout `newer` made the other.

        It made it of the copy of the same container, or for another one, to which the units went.
        """
        try:
            same = self._about(self._roots[newer], key).uid == self._about(self._roots[older], key).uid
        except FolderUnusable:
            return
        with trees.opened(self._roots[older if same else newer]) as root:
            trees.remove(root, key)
        self._number[key] = newer if same else older

    def keys(self) -> list[str]:
        """Folders that are there, of all layouts. Raises FolderUnusable."""
        found: set[str] = set()
        for _, path in self._existing():
            with _problem_of(path), trees.opened(path) as root:
                found |= {name for name in trees.names(root) if not name.startswith(".")}
        return sorted(found)

    def layout_of(self, key: str) -> ModuleType:
        """The module that reads and writes the files of a folder. Raises OtherLayout: there is none."""
        return self._layout(self._number.get(key, self.newest))

    def _layout(self, number: int) -> ModuleType:
        try:
            return self._layouts[number]
        except KeyError:
            text = f"files of layout {number} are kept as they are; this agent writes {sorted(self._layouts)}"
            raise OtherLayout(f"{text}: their container keeps its limits until it ends") from None

    def _root_of(self, key: str) -> Path:
        return self._roots[self._number.get(key, self.newest)]

    def path(self, key: str, name: str) -> Path:
        """A file of a folder, by the path that it has here and on the host."""
        return self._root_of(key) / key / name

    def create(self, about: About, context_bytes: int = 0) -> str:
        """Make a container's folder whole, or not at all; the key. Raises FolderUnusable.

        One that another pod left behind gives way: a container that had it mounted keeps the old files.
        """
        key, scratch = key_of(about.ids), f".{secrets.token_hex(8)}"
        files, home = self._layout(about.layout), self._roots[about.layout]
        limits = _limits(files, about, context_bytes)
        with _problem_of(home / key), trees.opened(home) as root:
            os.mkdir(scratch, 0o700, dir_fd=root)
            try:
                folder = os.open(scratch, trees.FOLDER, dir_fd=root)
                try:
                    _write(folder, ABOUT, msgspec.json.encode(about), 0o600)
                    _write(folder, LIMITS, limits, MODES[LIMITS])
                    # Sparse: its pages are the container's memory, not the agent's.
                    _write(folder, USAGE, files.usage_head(1), MODES[USAGE], files.USAGE_BYTES)
                    inner = home / scratch
                    if problem := label_for_pods(inner, inner / LIMITS, inner / USAGE):
                        raise FolderUnusable(problem)
                    self._drop(key)
                    os.rename(scratch, key, src_dir_fd=root, dst_dir_fd=root)
                    self._number[key] = about.layout
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
        return self._about(self._root_of(key), key)

    def _about(self, root: Path, key: str) -> About:
        path = root / key / ABOUT
        with _problem_of(path), trees.opened(root / key) as folder:
            file = opened(folder, ABOUT, os.O_RDONLY)  # no container has it
            try:
                content = os.pread(file, LONGEST_ABOUT, 0)
            finally:
                os.close(file)
        try:
            found = msgspec.json.decode(content, type=About)
        except msgspec.MsgspecError as error:
            raise FolderUnusable(f"{path} cannot be understood: {error}") from error
        if not found.ids or key_of(found.ids) != key:
            raise FolderUnusable(f"{path} is of other units than its folder")
        return found

    def limits(self, key: str) -> DeviceLimits:
        """The limits in force. Raises FolderUnusable."""
        files = self.layout_of(key)
        with self._file(key, LIMITS) as file:
            found: DeviceLimits = files.read_limits(os.pread(file, files.LIMITS_BYTES, 0))[0]
        return found

    def change(self, key: str, **values: Any) -> None:  # noqa: ANN401  fields of DeviceLimits
        """Change limits, in the very file that the container has mounted. Raises FolderUnusable."""
        files = self.layout_of(key)
        with self._changing, self._file(key, LIMITS) as file:
            now = files.read_limits(os.pread(file, files.LIMITS_BYTES, 0))[0]
            files.write_limits(file, 0, replace(now, **values))

    def resize(self, key: str, about: About) -> None:
        """Give a container another cap. Raises FolderUnusable.

        What the folder says of units comes first: an agent that is killed in between finds them there.
        """
        self.layout_of(key)
        with self._folder(key) as folder, trees.replacing(folder, ABOUT) as scratch:
            _write(folder, scratch, msgspec.json.encode(about), 0o600)
        self.change(key, memory_bytes=about.memory_bytes)

    def beat(self, key: str) -> None:
        """See `layout.beat`. Raises FolderUnusable."""
        with self._file(key, LIMITS) as file:
            self.layout_of(key).beat(file)

    def bound(self, key: str) -> bool:
        """Cut a usage region back; whether its container had made it longer. Raises FolderUnusable."""
        size: int = self.layout_of(key).USAGE_BYTES
        with self._file(key, USAGE) as file:
            longer = os.fstat(file).st_size > size
            if longer:
                os.ftruncate(file, size)
        return longer

    def mend(self, key: str, about: About) -> None:
        """Write a limit file again that cannot be read, in its place. Raises FolderUnusable."""
        files = self.layout_of(key)
        with self._file(key, LIMITS) as file:
            os.pwrite(file, _limits(files, about), 0)
            os.ftruncate(file, files.LIMITS_BYTES)

    def usage(self, key: str) -> CountedUsage | None:
        """The container's use by the library's word; None: the region cannot be read. A hint.

        Raises FolderUnusable.
        """
        files, found = self.layout_of(key), None
        with self._file(key, USAGE) as file, suppress(BadLayout):
            found = files.read_usage(os.pread(file, files.usage_head_bytes(1), 0))[0]
        return found

    def open_usage(self, key: str) -> int:
        """A descriptor by which a usage region can be read again and again. Raises FolderUnusable."""
        with self._file(key, USAGE) as file:
            return os.dup(file)

    def sole_process(self, key: str, total_bytes: int) -> tuple[int, int] | None:
        """The container's only process by the library's word: bytes charged, and those for contexts.

        None: it has several, or what is there says nothing. A hint. Raises FolderUnusable.
        """
        files = self.layout_of(key)
        with self._file(key, USAGE) as file:
            slots = os.pread(file, files.READ_SLOTS * files.SLOT_BYTES, files.SLOTS_AT)
        sole: tuple[int, int] | None = files.sole_process(slots, total_bytes)
        return sole

    def movable_bytes(self, key: str) -> int:
        """Bytes that are charged for memory which the driver may bring back from the host. A hint.

        Raises FolderUnusable.
        """
        files = self.layout_of(key)
        with self._file(key, USAGE) as file:
            found: int = files.movable_bytes(os.pread(file, files.SLOTS * files.SLOT_BYTES, files.SLOTS_AT))
        return found

    def entries(self, key: str) -> Entries:
        """The processes that say of themselves that they have the library. A hint. Raises FolderUnusable."""
        files = self.layout_of(key)
        with self._file(key, USAGE) as file:
            found: Entries = files.read_entries(
                os.pread(file, files.SLOTS * files.SLOT_BYTES, files.SLOTS_AT)
            )
        return found

    def remove(self, key: str) -> None:
        """Remove a folder; there may be none. Raises FolderUnusable."""
        with _problem_of(self.path(key, "").parent):
            self._drop(key)
        self.held.drop(key)

    def _drop(self, key: str) -> None:
        for _, path in self._existing():
            with trees.opened(path) as root:
                trees.remove(root, key)
        self._number.pop(key, None)

    @contextmanager
    def _folder(self, key: str) -> Iterator[int]:
        home = self._root_of(key)
        with _problem_of(home / key), trees.opened(home) as root:
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
        try:
            return self.held.get(key, name, folder, os.O_RDWR, MODES[name])
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            raise AccessRefused(f"{self.path(key, name)} is kept from the agent: {error.strerror}") from error


def _limits(files: ModuleType, about: About, context_bytes: int = 0) -> bytes:
    limits = files.DeviceLimits(
        about.gpu,
        about.memory_bytes,
        about.cores,
        context_bytes=context_bytes,
        strict=about.policy == "strict",
        driver=about.driver,
        compute=about.compute,
        share=about.cores_now * PERCENT if about.compute else 0,
    )
    found: bytes = files.limit_file(key_of(about.ids), (limits,))
    return found


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
