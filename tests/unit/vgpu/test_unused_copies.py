"""Copies of the library go with their containers, whatever else is out of order, and never before."""

from pathlib import Path

import anyio.to_thread
import pytest

from agent.vgpu.folders import ABOUT, key_of
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
