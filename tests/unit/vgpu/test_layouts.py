"""Files of two layouts lie beside each other, through upgrades and back: a library meets its own alone.

There is one layout so far. The next one is played by a second copy of its module, whose limit file begins
with other bytes: what reads one takes the other for no limit file, and would write over it.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from agent.kit.tasks import Cell
from agent.kubelet.wire import Mount
from agent.model.holding import Holding, Record
from agent.vgpu import layout
from agent.vgpu import library as libraries
from agent.vgpu.folders import LIMITS, USAGE, LimitFolders, key_of
from agent.vgpu.isolation_errors import OtherLayout
from agent.vgpu.limits import Enforcement
from agent.vgpu.room import Isolation
from tests.unit.vgpu.made_up import BLOCK, about, units
from tests.unit.vgpu.test_upgrade import HELD

NEXT = 2


@pytest.fixture
def later() -> Iterator[ModuleType]:
    """A layout after today's."""
    spec = importlib.util.spec_from_file_location("tests_next_layout", layout.__file__)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    found.LAYOUT, found.LIMITS_MAGIC = NEXT, layout.LIMITS_MAGIC + 1  # type: ignore[attr-defined]
    yield found
    del sys.modules[spec.name]


class Mounted:
    """A container that runs: it has the files of its mounts open, whatever becomes of their paths."""

    def __init__(self, mounts: tuple[Mount, ...], reader: ModuleType) -> None:
        self._paths = {Path(each.container_path).name: Path(each.host_path) for each in mounts}
        self._reader = reader
        self._file = os.open(self._paths[LIMITS], os.O_RDONLY)
        self._inodes = self._on_disk()

    def _on_disk(self) -> dict[str, int]:
        return {name: self._paths[name].stat().st_ino for name in (LIMITS, USAGE)}

    def cap(self) -> int:
        """By its own layout's reader, as its library has it."""
        found: int = self._reader.read_limits(os.pread(self._file, layout.LIMITS_BYTES, 0))[0].memory_bytes
        return found

    def starts_again(self) -> bool:
        """The kubelet repeats the mounts of before: whether these are the same files, of its layout."""
        content = self._paths[LIMITS].read_bytes()
        return self._on_disk() == self._inodes and bool(self._reader.read_limits(content))


class Node:
    """A host; `agent` starts one that serves these layouts, after the one before was stopped."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record: Cell[Record | None] = Cell(Record((), ()))
        self.pods: dict[str, tuple[str, ...]] = {}
        (root / "image.so").write_bytes(libraries.ELF + b"one")

    async def agent(self, *layouts: ModuleType) -> Isolation:
        made = Isolation(
            LimitFolders(self.root / "run", {each.LAYOUT: each for each in layouts}),
            self.root / "image.so",
            self.root / "state",
            Enforcement.LIBRARY,
            self.record,
        )
        await made.start()
        await made.tidy()
        return made

    async def admit(self, agent: Isolation, pod: str, first: int, reader: ModuleType) -> Mounted:
        self.pods[pod] = units(first)
        found = await agent.admit(about(pod, first))
        held = tuple(Holding("default", name, "main", HELD, ids) for name, ids in self.pods.items())
        alive = frozenset(f"uid-{name}" for name in self.pods)
        places = tuple(("default", name, "main") for name in self.pods)
        self.record.publish(Record(held, places, unfinished=alive))
        return Mounted(found.mounts, reader)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def resized(agent: Isolation, first: int, blocks: int) -> None:
    key = key_of(units(first))
    changed = msgspec.structs.replace(
        agent.containers.value[key].about, memory_bytes=blocks * BLOCK, grown=units(100 + first, blocks - 4)
    )
    await agent.resize(key, changed)


async def test_two_layouts_side_by_side(node: Node, later: ModuleType, logs: list[Any]) -> None:
    now = await node.agent(layout)  # its folders are those of 0.2.0
    old = await node.admit(now, "old", 0, layout)
    now.close()

    upgraded = await node.agent(layout, later)
    new = await node.admit(upgraded, "new", 10, later)
    assert set(upgraded.containers.value) == {key_of(units()), key_of(units(10))}
    await resized(upgraded, 0, 5)
    await resized(upgraded, 10, 6)
    assert (old.cap(), new.cap()) == (5 * BLOCK, 6 * BLOCK)
    assert old.starts_again()
    assert new.starts_again()
    upgraded.close()

    back = await node.agent(layout)
    # It knows the container, and keeps from others what that has grown by, but leaves its files alone.
    assert set(units(100, 1)) | set(units(110, 2)) == back.grown[about("old").gpu]
    with pytest.raises(OtherLayout):
        await resized(back, 10, 4)
    await resized(back, 0, 4)
    between = await node.admit(back, "between", 20, layout)
    assert (old.cap(), new.cap(), between.cap()) == (4 * BLOCK, 6 * BLOCK, 4 * BLOCK)
    assert all(each.starts_again() for each in (old, new, between))
    back.close()

    again = await node.agent(layout, later)
    await resized(again, 10, 5)
    assert (old.cap(), new.cap(), between.cap()) == (4 * BLOCK, 5 * BLOCK, 4 * BLOCK)
    assert all(each.starts_again() for each in (old, new, between))
    assert not [each for each in logs if each["event"] == "limits_written_anew"]


async def test_copy_keeps_its_layout_after_rollback_resize_and_reboot(node: Node, later: ModuleType) -> None:
    upgraded = await node.agent(layout, later)
    await node.admit(upgraded, "new", 10, later)
    upgraded.close()
    key = key_of(units(10))

    def resized_by_0_2_0() -> None:
        copy = node.root / "state" / "limits" / f"{key}.json"
        said = msgspec.json.decode(copy.read_bytes())
        assert said.pop("layout") == NEXT
        copy.write_bytes(msgspec.json.encode(said))

    def limits_there() -> list[Any]:
        content = (node.root / "run" / "limits.v2" / key / LIMITS).read_bytes()
        return list(later.read_limits(content))

    await anyio.to_thread.run_sync(resized_by_0_2_0)
    (await node.agent(layout, later)).close()
    await anyio.to_thread.run_sync(shutil.rmtree, node.root / "run")  # a reboot
    (await node.agent(layout, later)).close()
    assert (await anyio.to_thread.run_sync(limits_there))[0].memory_bytes == 4 * BLOCK


async def test_0_2_0_touches_no_file_of_a_later_layout(node: Node, later: ModuleType) -> None:
    """It looks below `limits` alone, and makes a folder there for each copy that has none."""
    upgraded = await node.agent(layout, later)
    new = await node.admit(upgraded, "new", 10, later)
    gone = await node.admit(upgraded, "gone", 30, later)
    upgraded.close()
    del node.pods["gone"]

    def back() -> None:
        known = LimitFolders(node.root / "run")
        known.create(about("new", 10))
        known.create(about("other", 30))  # its units went to another pod
        known.held.close()

    await anyio.to_thread.run_sync(back)
    assert new.starts_again()

    again = await node.agent(layout, later)
    await resized(again, 10, 5)
    assert new.cap() == 5 * BLOCK
    assert new.starts_again()
    assert not (node.root / "run" / "limits" / key_of(units(10))).exists()
    assert again.containers.value[key_of(units(30))].about.pod == "other"
    assert gone.cap() == 4 * BLOCK
    assert (node.root / "run" / "limits" / key_of(units(30))).exists()
