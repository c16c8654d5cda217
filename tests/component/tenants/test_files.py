"""Tenants and the files that the agent gives their containers: nobody else is held up, nor is the agent.

Each container has a mount namespace, as a runtime makes it; the agent is the project's own room of limits.
"""

import ctypes
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.pod import VGPU
from agent.vgpu import layout
from agent.vgpu.folders import LIMITS, USAGE, About, LimitFolders, key_of
from agent.vgpu.isolation_errors import FolderUnusable
from agent.vgpu.library import IN_CONTAINER, PRELOAD_IN_CONTAINER, Library
from agent.vgpu.limits import Enforcement
from agent.vgpu.room import Isolation
from clib.build_library import cached
from tests.cuda_double.program import Program, commanded
from tests.pace import scaled
from tests.unit.vgpu.made_up import BLOCK, GPU, units

pytestmark = pytest.mark.timeout(300)

TENANT = Path(__file__).with_name("tenant.py")
# As containerd gives them to a container: CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID
# SETFCAP SETPCAP NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE.
DEFAULT, NONE = 0xA80425FB, 0
Value = TypeVar("Value")
SOON = min(scaled(5.0), 30.0)  # seconds; a lease is waited for up to 45 s


FILES = {
    "preload": PRELOAD_IN_CONTAINER,
    "library": f"{IN_CONTAINER}/libgna-limits",
    "limits": f"{IN_CONTAINER}/{LIMITS}",
    "usage": f"{IN_CONTAINER}/{USAGE}",
}
WAYS = (
    *(
        "write_lease",
        "read_lease",
        "seal",
        "acl",
        "close",
        "give_away",
        "execute",
        "map_it",
        "lock",
        "rename",
    ),
    *("link", "remove", "fill", "empty"),
)
# Attempts that the kernel grants on a file; it refuses all others. Only the region is a container's own.
WITHOUT_AGENT = {
    "preload": {"write_lease", "read_lease", "map_it", "lock"},
    "library": {"write_lease", "read_lease", "map_it", "lock"},
    "limits": {"write_lease", "read_lease", "map_it", "lock"},
    "usage": {*WAYS} - {"seal", "rename", "link", "remove"},
}
WITH_AGENT = {
    "preload": WITHOUT_AGENT["preload"] - {"write_lease"},
    "library": WITHOUT_AGENT["library"] - {"write_lease"},
    "limits": WITHOUT_AGENT["limits"] - {"write_lease", "read_lease"},
    "usage": WITHOUT_AGENT["usage"] - {"write_lease", "read_lease", "execute"},
}

NOT_WITHOUT = {"give_away"}  # capabilities
# What an agent that comes back cannot undo, without any capability of its own.
REFUSED = {("usage", "execute"): "Text file busy", ("usage", "give_away"): "Operation not permitted"}


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root without capabilities, as the chart runs the agent: this thread, and those that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert libc.capget(header, before) == 0
    low, high = struct.unpack("<6I", before.raw)[1::3]
    assert libc.capset(header, struct.pack("<6I", 0, low, 0, 0, high, 0)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


class Host:
    """A node with containers of these capabilities, and agents one after the other."""

    def __init__(self, root: Path, stack: ExitStack, **capabilities: int) -> None:
        self._root = root
        self.abouts = {name: about(name, number) for number, name in enumerate(capabilities)}
        held = tuple(
            Holding("default", name, "main", VGPU.memory, each.ids) for name, each in self.abouts.items()
        )
        names = tuple(("default", name, "main") for name in self.abouts)
        self.record: Cell[Record | None] = Cell(Record(held, names))
        self.come_back()
        self.containers: dict[str, Program] = {}
        self.paths: dict[str, list[str]] = {}
        for name, each in capabilities.items():
            mounts = {
                mount.container_path: (mount.host_path, mount.read_only)
                for mount in self.run(partial(self.agent.admit, self.abouts[name])).mounts
            }
            words = [sys.executable, "-I", "-S", str(TENANT), json.dumps(mounts), f"{each:x}"]
            self.containers[name] = stack.enter_context(commanded(words))
            self.paths[name] = sorted(mounts)

    def path(self, name: str, file: str) -> str:
        """A file as a container has it."""
        return next(path for path in self.paths[name] if path.startswith(FILES[file]))

    def leave(self) -> None:
        """The agent is killed."""
        self.agent.close()

    def come_back(self) -> None:
        """Another one starts."""
        self.agent = Isolation(
            LimitFolders(self._root / "run"), cached(), self._root / "state", Enforcement.LIBRARY, self.record
        )
        self.run(self.agent.start)

    @staticmethod
    def run(call: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """Something that the agent does."""
        with unprivileged():
            return anyio.run(call)

    def serves(self, name: str) -> None:
        """The agent has all that it needs of a container. Raises FolderUnusable."""
        key, folders = key_of(self.abouts[name].ids), self.agent.folders
        with unprivileged():
            folders.hold(key)
        for blocks in (2, 4):
            folders.change(key, memory_bytes=blocks * BLOCK)
            assert folders.limits(key).memory_bytes == blocks * BLOCK
        with unprivileged():
            folders.bound(key)
        assert folders.path(key, USAGE).stat().st_size <= layout.USAGE_BYTES
        folders.usage(key)
        folders.entries(key)

    def has_all(self, name: str) -> bool:
        """Whether the agent has all files of a container open."""
        key = key_of(self.abouts[name].ids)
        build = self.agent.containers.value[key].about.build
        names = Library(Path(), build).names
        return self.agent.libraries._held.has(build, names) and self.agent.folders.held.has(
            key, (LIMITS, USAGE)
        )

    def serves_soon(self, name: str) -> None:
        """The same, after what the kernel makes the agent wait for."""
        until = time.monotonic() + SOON
        while True:
            try:
                self.serves(name)
            except FolderUnusable:
                assert time.monotonic() < until
                time.sleep(0.01)
            else:
                return

    def names(self, name: str, cause: str) -> None:
        """The agent cannot have a file of a container and says so, until it can."""
        assert self.agent.refusing.keys() == {key_of(self.abouts[name].ids)}
        assert next(iter(self.agent.refusing.values())).endswith(f"is kept from the agent: {cause}")
        self.restore(name)
        self.run(self.agent.tidy)
        assert not self.agent.refusing
        self.serves(name)

    def restore(self, name: str) -> None:
        """Let go of what a container holds, and have its usage region be as it was."""
        self.containers[name]("over()")
        usage = self.agent.folders.path(key_of(self.abouts[name].ids), USAGE)
        os.chown(usage, 0, 0)
        with suppress(OSError):
            os.removexattr(usage, "system.posix_acl_access")
        usage.chmod(0o666)
        usage.write_bytes(layout.usage_head(1).ljust(layout.USAGE_BYTES, b"\0"))


def about(pod: str, number: int) -> About:
    ids = units(4 * number)
    return About(f"uid-{pod}", "default", pod, "main", GPU, ids, len(ids) * BLOCK, 30)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with ExitStack() as stack:
        root = tmp_path_factory.mktemp("host")
        yield Host(root, stack, default=DEFAULT, none=NONE, neighbour=DEFAULT)


@pytest.mark.parametrize("agent", ["serves", "is down"])
def test_lease_on_preload_stalls_nobody(host: Host, agent: str) -> None:
    """Root of a container, without any capability, asks for a write lease on what the loader opens."""
    tenant, neighbour = host.containers["none"], host.containers["neighbour"]
    assert neighbour("start()") < SOON
    if agent == "is down":
        host.leave()
    try:
        had = tenant(f"write_lease({PRELOAD_IN_CONTAINER!r})")
        assert had is (agent == "is down")
        assert neighbour("start()") < SOON
        host.come_back()
        assert neighbour("start()") < SOON
    finally:
        host.restore("none")


def test_nobody_sees_the_program_starts_of_others(host: Host) -> None:
    tenant, neighbour = host.containers["none"], host.containers["neighbour"]
    watched = tenant(f"watch({PRELOAD_IN_CONTAINER!r})")
    neighbour("start()")
    assert tenant(f"seen({watched})") == 0
    tenant("start()")
    assert tenant(f"seen({watched})") > 0
    host.restore("none")


def test_leases_on_all_files_are_waited_for_at_once(host: Host) -> None:
    """Taken while no agent was there, each may last for `fs.lease-break-time`; the next agent asks once."""
    host.leave()
    try:
        assert all(host.containers["none"](f"write_lease({path!r})") for path in host.paths["none"])
        host.come_back()
        until = time.monotonic() + SOON
        while not host.has_all("none"):
            assert time.monotonic() < until
            time.sleep(0.01)
        host.serves("none")
    finally:
        host.restore("none")


@pytest.mark.parametrize("tenant", ["default", "none", "agent is down"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", FILES)
def test_every_file_of_a_tenant_withstands(host: Host, file: str, way: str, tenant: str) -> None:
    """Whatever root of a container does to a file: its neighbour and the agent go on."""
    down = tenant == "agent is down"
    name = "default" if down else tenant
    if down:
        host.leave()
    try:
        done = host.containers[name](f"attempt({way!r}, {host.path(name, file)!r})")
        neighbour = host.containers["neighbour"]
        for path in host.paths["neighbour"]:
            assert neighbour(f"reads({path!r})")
        if down:
            began = time.monotonic()
            host.come_back()
            assert time.monotonic() - began < SOON
        assert neighbour("start()") < SOON
        host.serves("neighbour")
        granted = (WITHOUT_AGENT if down else WITH_AGENT)[file] - (NOT_WITHOUT if name == "none" else set())
        assert (done == "done") is (way in granted), done
        if down and (file, way) in REFUSED:
            host.names(name, REFUSED[file, way])
        else:
            host.serves_soon(name)
    finally:
        host.restore(name)
