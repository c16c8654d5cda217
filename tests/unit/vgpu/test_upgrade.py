"""Containers that run while the agent is updated from 0.2.0, or taken back to it, keep what they have.

There one file of each build, `lib/libgna-limits-<build>.so`, served all containers, and one preload file.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.vgpu import library as libraries
from agent.vgpu.folders import LIMITS, USAGE, LimitFolders, key_of
from agent.vgpu.layout import HeldFiles, Leased
from agent.vgpu.library import Library
from agent.vgpu.limits import Enforcement
from agent.vgpu.room import GRACE_SECONDS, Isolation
from tests.unit.vgpu.made_up import about, units

CONTENT = libraries.ELF + b"one"
BUILD = hashlib.sha256(CONTENT).hexdigest()[:16]
HELD = "tencent.com/vcuda-memory"


class Node:
    """A host, with the agent of today."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        self.record: Cell[Record | None] = Cell(Record((), ()))
        (root / "image.so").write_bytes(CONTENT)
        self.lib = root / "state" / "lib"
        self.isolation = Isolation(
            LimitFolders(root / "run"),
            root / "image.so",
            root / "state",
            Enforcement.LIBRARY,
            self.record,
            clock=lambda: self.now,
        )

    def before(self) -> tuple[Path, Path]:
        """A container of 0.2.0; the files that it shares with others."""
        self.lib.mkdir(parents=True)
        shared = Library(self.lib, BUILD)
        shared.file.write_bytes(CONTENT)
        shared.preload.write_text(f"{shared.in_container}\n")
        folders = LimitFolders(self.root / "run")
        folders.prepare()
        folders.create(about("before", build=BUILD))
        return shared.file, shared.preload

    def holding(self, *pods: tuple[str, tuple[str, ...]]) -> None:
        held = tuple(Holding("default", name, "main", HELD, ids) for name, ids in pods)
        self.record.publish(Record(held, tuple(("default", name, "main") for name, _ in pods)))


def inodes(*files: Path) -> list[int]:
    return [file.stat().st_ino for file in files]


def leased(*files: Path) -> list[Path]:
    """Those on which their owner is granted a write lease."""
    found = []
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            found.append(file)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return found


def remove_unused_of_0_2_0(lib: Path, used: Collection[str]) -> None:
    """As 0.2.0 has it."""
    for file in list(lib.iterdir()):
        build = file.name.removeprefix("libgna-limits-").partition(".")[0]
        if file.name.startswith(".") or (file.name.startswith("libgna-limits-") and build not in used):
            file.unlink()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_an_update_leaves_running_containers_what_they_have(node: Node) -> None:
    shared = await anyio.to_thread.run_sync(node.before)
    limits = [node.root / "run" / "limits" / key_of(units()) / name for name in (LIMITS, USAGE)]
    was = inodes(*shared, *limits)
    assert leased(*shared) == list(shared)
    node.holding(("before", units()))
    await node.isolation.start()
    await node.isolation.admit(about("after", 10))
    node.holding(("before", units()), ("after", units(10)))
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    assert inodes(*shared, *limits) == was
    assert not leased(*shared, *limits)  # containers that share a file have it no less
    own = node.isolation.libraries.of(node.isolation.containers.value[key_of(units(10))].about).file
    assert own.stat().st_ino not in was
    # It goes with the last container that had it; copies of others stay.
    node.holding(("after", units(10)))
    await node.isolation.tidy()
    assert not any(file.exists() for file in shared)
    assert own.exists()


async def test_an_agent_of_before_finds_the_copies_and_removes_them_with_their_containers(node: Node) -> None:
    await node.isolation.start()
    for pod, first in (("a", 0), ("b", 10)):
        await node.isolation.admit(about(pod, first))
    node.isolation.close()

    def back() -> None:
        folders = LimitFolders(node.root / "run")  # its layout is that of 0.2.0
        builds = {key: folders.about(key).build for key in tuple(folders.keys())}
        files = {key: node.lib / f"libgna-limits-{build}.so" for key, build in builds.items()}
        preloads = {key: node.lib / f"libgna-limits-{build}.preload" for key, build in builds.items()}
        assert len(set(builds.values())) == 2
        remove_unused_of_0_2_0(node.lib, {*builds.values(), BUILD})
        for key, file in files.items():
            assert file.read_bytes() == CONTENT
            assert preloads[key].read_text() == f"/usr/lib/gpu-node-agent/{file.name}\n"
        _, stays = files
        remove_unused_of_0_2_0(node.lib, {builds[stays], BUILD})
        assert sorted(node.lib.iterdir()) == sorted([files[stays], preloads[stays]])

    await anyio.to_thread.run_sync(back)


async def test_a_lease_on_a_file_that_many_share_accuses_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    """Any of them may have taken it, and with `aboveCap: end` all would be ended."""
    await anyio.to_thread.run_sync(node.before)
    get = HeldFiles.get

    def leased(held: HeldFiles, key: str, name: str, *more: Any) -> int:
        if key == BUILD and name.endswith(".preload"):
            raise Leased(errno.EWOULDBLOCK, "a process of its container has a lease on it")
        return get(held, key, name, *more)

    monkeypatch.setattr(HeldFiles, "get", leased)
    await node.isolation.start()
    assert not node.isolation.refusing
    assert any("is kept from the agent" in each.get("problem", "") for each in logs)
