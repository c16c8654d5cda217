"""Limits of containers over their lives: admitted, found again after a restart, gone, and by which policy."""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from msgspec.structs import replace

from agent.kit.tasks import Cell
from agent.kubelet.wire import Allocation, Mount
from agent.model.holding import Holding, Record
from agent.model.pod import VGPU
from agent.vgpu import folders, layout
from agent.vgpu import library as libraries
from agent.vgpu.folders import ABOUT, LIMITS, USAGE, About, LimitFolders, key_of
from agent.vgpu.isolation_errors import FolderUnusable, IsolationError, LibraryUnusable
from agent.vgpu.limits import Enforcement
from agent.vgpu.room import GRACE_SECONDS, Isolation
from tests.unit.vgpu.made_up import BLOCK, GPU, units

HELD = "tencent.com/vcuda-memory"


class Node:
    """A host, its record of who holds what, and agents one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        self.read = float("inf")  # when the newest reading began
        self.record: Cell[Record | None] = Cell(Record((), ()))
        self.namespaces: dict[str, Enforcement] = {}
        (root / "image.so").write_bytes(libraries.ELF + b"one")
        self.isolation = self.agent()

    def agent(self, policy: Enforcement = Enforcement.LIBRARY, source: str = "image.so") -> Isolation:
        self.isolation = Isolation(
            LimitFolders(self.root / "run"),
            self.root / source,
            self.root / "state",
            policy,
            self.record,
            self.namespaces.get,
            lambda: self.now,
            read=lambda: self.read,
        )
        return self.isolation

    def holding(
        self, *pods: tuple[str, tuple[str, ...]], ended: Iterable[str] = (), unfinished: Iterable[str] = ()
    ) -> None:
        held = tuple(Holding("default", name, "main", HELD, ids) for name, ids in pods)
        containers = tuple(("default", name, "main") for name, _ in pods)
        self.record.publish(Record(held, containers, frozenset(ended), frozenset(unfinished)))

    async def folders(self) -> list[str]:
        return await anyio.to_thread.run_sync(self.isolation.folders.keys)


def file_of(mount: Mount) -> Path:
    return Path(mount.host_path)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def request(pod: str, first: int = 0, count: int = 4) -> About:
    ids = units(first, count)
    return About(f"uid-{pod}", "default", pod, "main", GPU, ids, count * BLOCK, 30)


async def test_a_library_that_was_removed_is_there_again_for_its_container_and_the_next(node: Node) -> None:
    await node.isolation.start()
    first = (await node.isolation.admit(request("a"))).mounts
    node.holding(("a", units()))
    files = [file_of(each) for each in first if each.read_only and file_of(each).name != LIMITS]

    def remove() -> None:
        (node.root / "image.so").unlink()
        for file in files:
            file.unlink()
            file.mkdir()  # as a runtime does that starts a container without it

    await anyio.to_thread.run_sync(remove)
    assert (await node.isolation.admit(request("b", 10))).mounts
    await node.isolation.tidy()
    assert all(file.is_file() for file in files)
    assert node.isolation.libraries.problem is None


async def test_a_library_that_cannot_be_copied_is_not_shown(node: Node) -> None:
    await node.isolation.start()

    def no_folder() -> None:
        (node.root / "state" / "lib").rmdir()
        (node.root / "state" / "lib").write_bytes(b"")

    await anyio.to_thread.run_sync(no_folder)
    assert await node.isolation.admit(request("c", 20)) == Allocation()
    assert not await node.folders()
    assert not node.isolation.containers.value


def full(node: Node, monkeypatch: pytest.MonkeyPatch, room: Any, code: int = errno.ENOSPC) -> None:
    """Nothing can be written while a usage region is longer than it should be."""
    write = room._write

    def guarded(*words: Any, **more: Any) -> None:
        if any(each.stat().st_size > layout.USAGE_BYTES for each in (node.root / "run").rglob(USAGE)):
            raise OSError(code, os.strerror(code))
        write(*words, **more)

    monkeypatch.setattr(room, "_write", guarded)


def lengthen(mounts: Iterable[Mount]) -> None:
    (usage,) = [file_of(each) for each in mounts if not each.read_only]
    with usage.open("ab") as file:
        file.truncate(layout.USAGE_BYTES + 1)


@pytest.mark.parametrize("room", [folders, libraries], ids=["run", "state"])
async def test_who_fills_the_node_by_its_usage_region_keeps_nobody_from_limits(
    node: Node, monkeypatch: pytest.MonkeyPatch, room: Any
) -> None:
    await node.isolation.start()
    full(node, monkeypatch, room)
    lengthen((await node.isolation.admit(request("a"))).mounts)
    assert len((await node.isolation.admit(request("b", 10))).mounts) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [folders, libraries], ids=["run", "state"])
async def test_nobody_is_rid_of_limits_by_a_full_node(
    node: Node, monkeypatch: pytest.MonkeyPatch, room: Any, code: int
) -> None:
    await node.isolation.start()
    full(node, monkeypatch, room, code)
    lengthen((await node.isolation.admit(request("a"))).mounts)
    monkeypatch.setattr(LimitFolders, "bound", lambda *_: False)  # or the disk is full of other things
    with pytest.raises(IsolationError, match=r"cannot be (put|kept) there: .*; .*or set vgpu.enforcement"):
        await node.isolation.admit(request("b", 10))
    node.namespaces["default"] = Enforcement.REPORT
    assert await node.isolation.admit(request("b", 10)) == Allocation()


async def test_copies_of_an_agent_that_was_killed_as_it_made_them_go_with_the_first_look(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    node.holding(("a", units()))

    def copies() -> set[str]:
        return {each.name for each in (node.root / "state" / "lib").iterdir()}

    def orphan() -> None:
        (node.root / "state" / "lib" / f"{libraries.NAME}-0123456789abcdef-77.so").touch()

    kept = await anyio.to_thread.run_sync(copies)
    await anyio.to_thread.run_sync(orphan)
    node.isolation.close()
    await node.agent().start()
    await node.isolation.tidy()
    assert await anyio.to_thread.run_sync(copies) == kept


async def test_a_container_gets_all_four_files_or_none(node: Node) -> None:
    await node.isolation.start()
    assert node.isolation.libraries.problem is None
    mounts = {each.container_path: each for each in (await node.isolation.admit(request("a"))).mounts}
    library = next(path for path in mounts if path.endswith(".so"))
    assert mounts.keys() == {
        library,
        "/etc/ld.so.preload",
        "/usr/lib/gpu-node-agent/limits",
        "/usr/lib/gpu-node-agent/usage",
    }
    assert file_of(mounts["/etc/ld.so.preload"]).read_text() == f"{library}\n"
    assert {path for path, each in mounts.items() if not each.read_only} == {"/usr/lib/gpu-node-agent/usage"}
    assert all(file_of(each).is_file() for each in mounts.values())
    key = key_of(units())
    assert node.isolation.folders.limits(key).memory_bytes == 4 * BLOCK
    assert node.isolation.containers.value[key].about.pod == "a"


async def test_a_folder_goes_when_its_container_is_in_no_record(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    await node.isolation.admit(request("b", first=100))
    node.now = GRACE_SECONDS - 1
    await node.isolation.tidy()
    assert len(await node.folders()) == 2  # the record may not show what was granted a moment ago
    node.holding(("a", units()))
    node.now = GRACE_SECONDS
    await node.isolation.tidy()
    assert await node.folders() == [key_of(units())]
    assert node.isolation.containers.value.keys() == {key_of(units())}


async def test_no_age_ends_limits_that_no_later_reading_was_to_show(node: Node) -> None:
    """Storm 22000020: the container ran, and a kubelet without a checkpoint took longer to answer."""
    await node.isolation.start()
    node.now = node.read = 5.0
    await node.isolation.admit(request("a"))
    node.now = 9 * GRACE_SECONDS
    for node.read, left in ((4 + GRACE_SECONDS, 1), (5 + GRACE_SECONDS, 0)):
        await node.isolation.tidy()
        assert len(await node.folders()) == left


async def test_a_container_keeps_its_folder_when_the_one_before_with_the_same_units_goes(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("before"))
    node.holding(("before", units()))
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    # The next one is admitted while the record still shows the one before, and then neither.
    await node.isolation.admit(request("next"))
    await node.isolation.tidy()
    node.holding(ended=["uid-before"])
    await node.isolation.tidy()
    assert await node.folders() == [key_of(units())]
    assert node.isolation.containers.value[key_of(units())].about.pod == "next"


async def test_a_folder_that_is_made_anew_while_it_is_to_go_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("other", first=100))
    await node.isolation.admit(request("before"))
    node.now = 2 * GRACE_SECONDS
    remove = node.isolation.folders.remove

    def slow(key: str) -> None:
        if key == key_of(units(100)):
            anyio.from_thread.run(anyio.sleep, 0.05)
        remove(key)

    monkeypatch.setattr(node.isolation.folders, "remove", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(node.isolation.tidy)
        await anyio.wait_all_tasks_blocked()
        await node.isolation.admit(request("next"))
    assert await node.folders() == [key_of(units())]
    assert node.isolation.containers.value[key_of(units())].about.pod == "next"


async def test_limits_stay_while_the_container_runs(node: Node) -> None:
    """A kubelet that has just started, or whose runtime hangs, may list nobody for as long as it likes."""
    await node.isolation.start()
    mounts = (await node.isolation.admit(request("a"))).mounts
    node.holding(("a", units()), unfinished=["uid-a"])
    await node.isolation.tidy()
    inodes = [file_of(each).stat().st_ino for each in mounts]
    for agent in ("the same", "another"):
        if agent == "another":
            await node.agent().start()
        node.holding(unfinished=["uid-a"])
        node.now += 100 * GRACE_SECONDS
        await node.isolation.tidy()
        assert [file_of(each).stat().st_ino for each in mounts] == inodes, agent
    # Deleted by force, it is neither held nor known, and its containers run on until the kubelet says else.
    node.holding(ended=["uid-a"], unfinished=["uid-a"])
    await node.isolation.tidy()
    assert [file_of(each).stat().st_ino for each in mounts] == inodes
    node.holding(ended=["uid-a"])
    await node.isolation.tidy()
    assert await node.folders() == []


@pytest.mark.parametrize("known", ["listed", "before", "just granted"])
async def test_limits_stay_while_neither_record_nor_api_server_says_whose_they_are(
    node: Node, known: str
) -> None:
    """The kubelet has lost its checkpoint, and the API server is away."""
    listed = known == "listed"
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    if listed:  # by its name, without units that it had
        node.holding(("a", units()))
        await node.isolation.tidy()
    elif known == "before":
        await node.agent().start()
    node.now += 2 * GRACE_SECONDS
    names = (("default", "a", "main"),) if listed else ()
    for away, shown in ((True, False), (False, False), (False, True)):
        # A watch that is mute says neither; what the kubelet lists runs until the pod is shown.
        unshown = frozenset() if shown else frozenset(each[:2] for each in names)
        node.record.publish(Record((), names, away=away, unshown=unshown))
        await node.isolation.tidy()
        assert bool(await node.folders()) == (away or (listed and not shown))


@pytest.mark.parametrize("by", ["somebody", "the agent"])
async def test_limits_that_are_missing_are_put_back_while_the_container_is_held(node: Node, by: str) -> None:
    await node.isolation.start()
    mounts = (await node.isolation.admit(request("a"))).mounts
    if by == "the agent":  # without the API server nothing says that it lives
        node.holding()
        node.now += 2 * GRACE_SECONDS
        await node.isolation.tidy()
    else:
        await anyio.to_thread.run_sync(shutil.rmtree, node.isolation.folders.root / key_of(units()))
    assert not any(file_of(each).exists() for each in mounts if each.container_path.endswith("/limits"))
    node.holding(("a", units()), unfinished=["uid-another"])
    await node.isolation.tidy()
    assert await node.folders() == []
    node.holding(("a", units()), unfinished=["uid-a"])
    await node.isolation.tidy()
    assert all(file_of(each).exists() for each in mounts if "gpu-node-agent/u" in each.container_path)
    assert node.isolation.folders.limits(key_of(units())).memory_bytes == 4 * BLOCK
    await node.agent().start()
    assert node.isolation.containers.value.keys() == {key_of(units())}


async def test_a_folder_that_cannot_be_removed_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: str) -> None:
        raise FolderUnusable("busy")

    await node.isolation.start()
    await node.isolation.admit(request("a"))
    node.now = GRACE_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(node.isolation.folders, "remove", busy)
        await node.isolation.tidy()
    node.now += GRACE_SECONDS
    await node.isolation.tidy()
    assert await node.folders() == []


async def test_a_pod_that_has_ended_leaves_nothing_at_once(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    node.holding(ended=["uid-a"])
    await node.isolation.tidy()
    assert await node.folders() == []


async def test_limits_stay_that_a_pod_got_under_the_name_and_uid_of_the_one_before(node: Node) -> None:
    """An interrupted watch showed the one before, and shows its end before a reading shows the new units."""
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    node.record.publish(Record((), (("default", "a", "main"),), frozenset({"uid-a"})))
    await node.isolation.tidy()
    node.now = 2 * GRACE_SECONDS
    node.holding(("a", units()), ended=["uid-a"])
    await node.isolation.tidy()
    assert await node.folders() == [key_of(units())]


async def test_limits_are_of_the_true_pod_once_its_kubelet_names_it(node: Node) -> None:
    """They were made while a mute watch showed an earlier pod of the name."""
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    (limits,) = node.isolation.containers.value.values()
    await node.isolation.resize(key_of(units()), replace(limits.about, memory_bytes=3 * BLOCK))
    inode = node.isolation.folders.path(key_of(units()), LIMITS).stat().st_ino

    def named(uid: str, *unfinished: str) -> Record:
        held = Holding("default", "a", "main", HELD, units())
        listed = (("default", "a", "main"),)
        return Record((held,), listed, unfinished=frozenset(unfinished), uids={("default", "a"): uid})

    for record, uid in (
        (named("uid-older", "uid-a", "uid-older"), "uid-a"),  # an entry of before
        (named("uid-true", "uid-true"), "uid-true"),
    ):
        node.record.publish(record)
        await node.isolation.tidy()
        (limits,) = node.isolation.containers.value.values()
        assert limits.about.uid == node.isolation.folders.about(key_of(units())).uid == uid
    assert node.isolation.folders.limits(key_of(units())).memory_bytes == 3 * BLOCK
    assert node.isolation.folders.path(key_of(units()), LIMITS).stat().st_ino == inode
    node.record.publish(Record((), (), unfinished=frozenset({"uid-true"})))
    node.now += 2 * GRACE_SECONDS
    await node.isolation.tidy()
    assert await node.folders() == [key_of(units())]


async def test_while_nobody_knows_who_holds_what_all_folders_stay(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    node.record.publish(None)
    node.now = 10 * GRACE_SECONDS
    await node.isolation.tidy()
    assert await node.folders() == [key_of(units())]


async def test_limits_are_found_again_after_a_restart_and_their_files_are_the_same(node: Node) -> None:
    await node.isolation.start()
    mounts = (await node.isolation.admit(request("a"))).mounts
    inodes = [file_of(each).stat().st_ino for each in mounts]
    before = dict(node.isolation.containers.value)
    node.holding(("a", units()))
    (node.root / "image.so").write_bytes(libraries.ELF + b"two")  # an update
    await node.agent().start()
    assert dict(node.isolation.containers.value) == before
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    assert [file_of(each).stat().st_ino for each in mounts] == inodes
    newer = (await node.isolation.admit(request("b", first=100))).mounts
    assert newer[0].host_path != mounts[0].host_path
    # The old library goes with its last container.
    node.holding(("b", units(100)))
    await node.isolation.tidy()
    assert not file_of(mounts[0]).exists()
    assert file_of(newer[0]).exists()


async def test_a_hundred_pods_one_after_the_other_leave_nothing(node: Node) -> None:
    await node.isolation.start()
    for number in range(100):
        await node.isolation.admit(request(f"p{number}", first=number % 3))
        node.holding(ended=[f"uid-p{number}"])
        await node.isolation.tidy()
    assert await node.folders() == []
    assert not node.isolation.containers.value
    assert not node.isolation._born
    assert not list((node.root / "state" / "lib").iterdir())


async def test_a_folder_that_does_not_say_whose_it_is_stays_with_its_container_and_goes_after_it(
    node: Node,
) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    key = key_of(units())
    node.isolation.folders.path(key, ABOUT).write_bytes(b"garbage")
    await node.agent().start()
    node.holding(("a", units()))
    node.now = 2 * GRACE_SECONDS
    await node.isolation.tidy()
    assert await node.folders() == [key]
    node.holding()
    await node.isolation.tidy()
    assert await node.folders() == []


async def test_a_damaged_limit_file_is_mended_at_the_start(node: Node) -> None:
    await node.isolation.start()
    await node.isolation.admit(request("a"))
    key = key_of(units())
    node.isolation.folders.path(key, LIMITS).write_bytes(b"garbage")
    await node.agent().start()
    assert node.isolation.folders.limits(key).memory_bytes == 4 * BLOCK


@pytest.mark.parametrize("policy", [Enforcement.OFF, Enforcement.REPORT])
async def test_a_namespace_without_the_library_gets_nothing(node: Node, policy: Enforcement) -> None:
    node.namespaces["default"] = policy
    await node.isolation.start()
    assert await node.isolation.admit(request("a")) == Allocation()
    assert await node.folders() == []


async def test_without_a_library_containers_start_without_it_and_it_is_told(node: Node) -> None:
    await node.agent(source="nothing.so").start()
    assert "nothing.so cannot be read" in (node.isolation.libraries.problem or "")
    assert await node.isolation.admit(request("a")) == Allocation()


async def test_a_strict_namespace_starts_no_container_without_the_library(node: Node) -> None:
    node.namespaces["default"] = Enforcement.STRICT
    await node.agent(source="nothing.so").start()
    with pytest.raises(LibraryUnusable, match=r"nothing\.so"):
        await node.isolation.admit(request("a"))


async def test_strict_is_written_to_the_limits(node: Node) -> None:
    await node.agent(Enforcement.STRICT).start()
    await node.isolation.admit(request("a"))
    assert node.isolation.folders.limits(key_of(units())).strict


async def test_a_folder_that_cannot_be_made_refuses_under_strict_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise FolderUnusable("no space left")

    await node.isolation.start()
    monkeypatch.setattr(node.isolation.folders, "create", full)
    assert await node.isolation.admit(request("a")) == Allocation()
    assert not node.isolation.containers.value
    node.namespaces["default"] = Enforcement.STRICT
    with pytest.raises(FolderUnusable):
        await node.isolation.admit(request("a"))


def test_the_resource_is_that_of_vgpu_memory() -> None:
    assert VGPU.memory == HELD
