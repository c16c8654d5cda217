"""After a reboot: limit folders lay in memory, and the kubelet repeats the mounts of before."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest

from agent.model.holding import Holding, Record
from agent.model.pod import VGPU
from agent.vgpu.folders import About, LimitFolders, key_of
from agent.vgpu.isolation_errors import FolderUnusable
from tests.unit.vgpu.made_up import units
from tests.unit.vgpu.test_watch import CAP, Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def rebooted(node: Node, key: str) -> None:
    """Leftovers of a runtime that starts the container before the agent: folders where files are missing."""
    shutil.rmtree(node.root / "run" / "limits")
    for name in ("limits", "usage"):
        (node.root / "run" / "limits" / key / name).mkdir(parents=True)


def files(root: Path) -> list[str]:
    return sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())


async def test_folders_are_there_again_after_a_reboot(node: Node) -> None:
    key = await node.admit()
    isolation = node.isolation
    about = isolation.containers.value[key].about
    ids = units(10, 2)
    await isolation.resize(key, msgspec.structs.replace(about, memory_bytes=2 * CAP, grown=ids))
    await anyio.to_thread.run_sync(rebooted, node, key)
    again = Node(node.root)
    await again.isolation.start()
    found = again.isolation.containers.value[key]
    assert (found.memory_bytes, found.about.grown) == (2 * CAP, ids)
    limits = await anyio.to_thread.run_sync(again.isolation.folders.limits, key)
    assert limits.memory_bytes == 2 * CAP
    assert await anyio.to_thread.run_sync(again.isolation.folders.usage, key)
    assert again.isolation.grown == {about.gpu: frozenset(ids)}
    # One whose pod has gone meanwhile goes like any other, and its copy with it.
    again.now = 100.0
    await again.isolation.tidy()
    assert not again.isolation.containers.value
    state, run = node.root / "state" / "limits", node.root / "run" / "limits"
    assert await anyio.to_thread.run_sync(files, state) == []
    assert await anyio.to_thread.run_sync(files, run) == []


async def held_again(agent: Node, key: str) -> None:
    """Its kubelet lists what the container holds: its limits are made again."""
    holding = Holding("default", "a", "main", VGPU.memory, units())
    agent.record.publish(Record((holding,), unfinished=frozenset({"uid-a"})))
    await agent.isolation.tidy()
    assert agent.isolation.containers.value[key].memory_bytes == CAP
    assert not agent.isolation._strays


async def next_agent(agent: Node, key: str) -> None:
    later = Node(agent.root)
    await later.isolation.start()
    assert later.isolation.containers.value[key].memory_bytes == CAP


@pytest.mark.parametrize("then", [held_again, next_agent])
async def test_a_copy_whose_folder_cannot_be_made_is_the_next_agent_s(
    node: Node, monkeypatch: pytest.MonkeyPatch, then: Callable[[Node, str], Awaitable[None]]
) -> None:
    """The file system is full, and a kubelet that has just started shows nothing of the container."""
    key = await node.admit()
    await anyio.to_thread.run_sync(rebooted, node, key)
    again = Node(node.root)

    def full(self: LimitFolders, about: About) -> str:
        raise FolderUnusable("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LimitFolders, "create", full)
        await again.isolation.start()
    assert not again.isolation.containers.value
    again.now = 100.0
    await again.isolation.tidy()
    await then(again, key)


async def test_a_copy_that_is_none_is_removed(node: Node) -> None:
    key = await node.admit()
    state = node.root / "state" / "limits"

    def spoil() -> None:
        rebooted(node, key)
        copy = (state / f"{key}.json").read_text()
        (state / f"{key_of(units(20, 1))}.json").write_text(copy)  # of other units
        (state / f"{key_of(units(30, 1))}.json").write_text("{")
        (state / f"{key_of(units(40, 1))}.json").write_bytes(b"\xff")

    await anyio.to_thread.run_sync(spoil)
    again = Node(node.root)
    await again.isolation.start()
    assert set(again.isolation.containers.value) == {key}
    assert await anyio.to_thread.run_sync(files, state) == [f"{key}.json"]
