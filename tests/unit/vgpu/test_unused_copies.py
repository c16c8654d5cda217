"""Copies of the library go with their containers, whatever else is out of order, and never before."""

import shutil
from pathlib import Path

import anyio.to_thread
import pytest
from msgspec.structs import replace

from agent.vgpu.folders import ABOUT, LimitFolders, key_of
from agent.vgpu.isolation_errors import FolderUnusable
from agent.vgpu.room import GRACE_SECONDS
from tests.unit.vgpu.made_up import units
from tests.unit.vgpu.test_room import Node, file_of, request


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def libraries(node: Node) -> set[Path]:
    return set((node.root / "state" / "lib").iterdir())


@pytest.mark.parametrize("without", ["a record", "the word of a folder whose it is"])
async def test_copies_of_containers_before_go_without_a_record_and_with_strays(
    node: Node, without: str
) -> None:
    """An error that lasts lets no container's copy, nor the files that are open of it, stay for good."""
    await node.isolation.start()
    stray = (await node.isolation.admit(request("stray", 100))).mounts
    node.isolation.folders.path(key_of(units(100)), ABOUT).write_bytes(b"garbage")
    (node.root / "state" / "limits" / f"{key_of(units(100))}.json").unlink()
    node.isolation.close()
    await node.agent().start()
    for number in range(50):
        last = (await node.isolation.admit(request(f"p{number}"))).mounts
    if without == "a record":
        node.record.publish(None)
    else:
        node.holding(("stray", units(100)), ("p49", units()))
    await node.isolation.tidy()
    assert len(node.isolation.libraries._held.keys()) == 1
    there = await anyio.to_thread.run_sync(libraries, node)
    assert there == {file_of(each) for each in (*stray, *last) if file_of(each).parent.name == "lib"}
    # Once nobody is a stray any more all goes that is nobody's.
    node.holding(("p49", units()))
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    there = await anyio.to_thread.run_sync(libraries, node)
    assert there == {file_of(each) for each in last if file_of(each).parent.name == "lib"}


async def test_an_init_container_keeps_its_copy_for_as_long_as_its_pod_has_the_units(node: Node) -> None:
    """The kubelet asks for the container that inherits them before either starts."""
    await node.isolation.start()
    mounts = [
        (await node.isolation.admit(replace(request("a"), container=name))).mounts
        for name in ("init", "main", "init", "main")  # again by a kubelet that was restarted
    ]
    node.holding(("a", units()), unfinished=["uid-a"])
    last = {file_of(each) for part in mounts[2:] for each in part if file_of(each).parent.name == "lib"}
    for _ in "the same agent", "the next":
        await node.isolation.tidy()
        assert await anyio.to_thread.run_sync(libraries, node) == last
        node.isolation.close()
        await node.agent().start()
    node.holding(ended=["uid-a"])
    await node.isolation.tidy()
    assert not await anyio.to_thread.run_sync(libraries, node)


async def test_limits_that_are_remembered_take_little_memory(node: Node) -> None:
    await node.isolation.start()
    for number in range(20):
        ids = units(300 * number, 280)
        await node.isolation.admit(replace(request(f"p{number}"), ids=ids))
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    assert len(node.isolation._removed) == 20
    assert sum(map(len, node.isolation._removed.values())) < 20 << 10


@pytest.mark.parametrize("broken", ["keys", "create"])
async def test_copies_stay_where_not_all_containers_of_before_were_found(
    node: Node, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The root cannot be read, or a folder cannot be made again after a reboot: their containers run on."""
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    there = await anyio.to_thread.run_sync(libraries, node)
    node.isolation.close()
    if broken == "create":
        await anyio.to_thread.run_sync(shutil.rmtree, node.root / "run" / "limits")

    def fails(*_: object) -> None:
        raise FolderUnusable("no space")

    monkeypatch.setattr(LimitFolders, broken, fails)
    await node.agent().start()
    await node.isolation.tidy()
    assert there
    assert await anyio.to_thread.run_sync(libraries, node) == there
