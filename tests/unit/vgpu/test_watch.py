"""The driver's figures of containers: the sweep, the check that the library is there, unseen memory."""

import os
import shutil
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL

import anyio
import anyio.to_thread
import msgspec
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Record
from agent.model.pod import Pod
from agent.pairing.pairing import Recorder
from agent.telemetry import definitions as d
from agent.telemetry.definitions import Definition
from agent.vgpu import layout
from agent.vgpu import library as libraries
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import LIMITS, USAGE, About, LimitFolders, Place, key_of
from agent.vgpu.limits import Enforcement
from agent.vgpu.publishing import ANNOTATION, PATIENCE_SECONDS, UNVERIFIED, Publisher
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch, Measured, loads, tolerance
from tests.pace import scaled
from tests.unit.vgpu.made_up import BLOCK, GPU, units

CAP = 4 * BLOCK
MIB = 1 << 20
PLACE = Place("default", "a", "main", GPU)


def metric(publisher: Publisher, wanted: Definition) -> list[float]:
    """The values of a metric."""
    return [value for definition, value, _ in publisher.metrics() if definition is wanted]


class Owners(Recorder):
    """Events for the owners of pods."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Mapping[str, str]]] = []
        self.events: list[tuple[str, str, bool]] = []
        self.messages: list[str] = []

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        self.notes.append((pod.name, annotations))

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
        self.events.append((pod.name, reason, warning))
        self.messages.append(message)


class Reporting:
    """A host on which limits are watched."""

    root: Path
    isolation: Isolation
    owners: Owners

    def reports(self) -> None:
        """Watch, events and publisher of an agent that has just started."""
        self.events = LimitEvents(self.isolation, self.owners)
        self.watch = LimitWatch(self.isolation, self.events, self.root / "proc")
        self.publisher = Publisher(self.isolation, self.events, self.watch)


class Node(Reporting):
    """A container with limits on a host whose processes are made up."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        (root / "image.so").write_bytes(libraries.ELF)
        self.record: Cell[Record | None] = Cell(Record())
        self.policies: dict[str, Enforcement] = {}
        folders = LimitFolders(root / "run")
        self.isolation = Isolation(
            folders,
            root / "image.so",
            root / "state",
            Enforcement.LIBRARY,
            self.record,
            self.policies.get,
            lambda: self.now,
        )
        self.owners = Owners()
        self.reports()

    def ending(self, *ids: str) -> None:
        """By option, containers above their caps are ended; `ids` of those that there are."""
        self.watch = LimitWatch(self.isolation, self.events, self.root / "proc", True, lambda _: ids)
        self.publisher = Publisher(self.isolation, self.events, self.watch)

    async def admit(self) -> str:
        await self.isolation.start()
        await self.isolation.admit(About("uid-a", "default", "a", "main", GPU, units(), CAP, 30))
        return key_of(units())

    async def look(self, memory: int, *pids: int, cap: int = CAP) -> None:
        await self.watch.look([Measured(PLACE, cap, memory, pids)])
        self.publisher.publish()

    def process(self, pid: int, *lines: str) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "maps").write_text("".join(f"{line}\n" for line in lines))

    def untraceable(self, pid: int, own: int, start: int) -> None:
        """A process whose map the agent has no right to read."""
        folder = self.root / "proc" / str(pid)
        (folder / "maps").mkdir(parents=True)  # root may read any file
        (folder / "status").write_text(f"Name:\tNSpid: 9\nNSpid:\t{pid}\t77\t{own}\n")
        (folder / "stat").write_text(f"{pid} (a) b) {' '.join(['S', *['1'] * 18, str(start), '0'])}\n")

    def enter(self, number: int, own: int, state: int, start: int) -> None:
        """The library's entry for a process that it is in."""
        descriptor = os.open(self.isolation.folders.path(key_of(units()), USAGE), os.O_RDWR)
        entry = layout.ENTRY.pack(own, state, start)
        os.pwrite(descriptor, entry, layout.SLOTS_AT + number * layout.SLOT_BYTES)
        os.close(descriptor)

    def loaded(self, pid: int) -> None:
        file = self.isolation.libraries.of(self.isolation.containers.value[key_of(units())].about).file
        self.process(pid, mapping(file.stat().st_ino, f"/usr/lib/gpu-node-agent/{file.name}"))


def mapping(inode: int, path: str) -> str:
    return f"7f0000000000-7f0000001000 r-xp 00000000 08:01 {inode}   {path}"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_who_stays_above_its_cap_is_told_of_once(node: Node) -> None:
    await node.admit()
    await node.look(CAP + tolerance(CAP))
    assert not node.watch.seen.value.above
    await node.look(CAP + tolerance(CAP) + 1)
    assert not node.watch.seen.value.above  # one reading may be of a process that just ended
    for _ in range(3):
        await node.look(CAP + tolerance(CAP) + 1)
        assert node.watch.seen.value.above == {PLACE}
    assert node.owners.events.count(("a", "MemoryCapExceeded", True)) == 1
    await node.look(CAP)
    assert not node.watch.seen.value.above
    for _ in range(2):
        await node.look(2 * CAP)
    assert node.owners.events.count(("a", "MemoryCapExceeded", True)) == 2


async def test_a_container_without_a_folder_is_measured_by_its_units(node: Node) -> None:
    await node.isolation.start()
    for _ in range(2):
        await node.look(2 * CAP)
    assert node.watch.seen.value.above == {PLACE}
    node.policies["default"] = Enforcement.OFF
    await node.look(2 * CAP)
    assert not node.watch.seen.value.above


async def test_a_process_without_the_library_is_told_of(node: Node) -> None:
    key = await node.admit()
    await node.look(0)
    assert node.isolation.containers.value[key].injected is None
    assert node.publisher.by_fence() == {"driver": 0, "library": 0, "sweep": 1}  # given, and not seen
    assert UNVERIFIED in node.owners.messages[0]
    await anyio.to_thread.run_sync(node.loaded, 7)
    await node.look(0, 7)
    assert node.isolation.containers.value[key].injected is True
    assert node.publisher.by_fence() == {"driver": 0, "library": 1, "sweep": 1}
    await anyio.to_thread.run_sync(node.process, 8, mapping(1, "/usr/bin/static"))
    for _ in range(3):
        await node.look(0, 7, 8)
    assert node.isolation.containers.value[key].injected is False
    assert node.publisher.by_fence() == {"driver": 0, "library": 0, "sweep": 1}
    assert metric(node.publisher, d.CONTAINERS_WITHOUT_LIBRARY) == [1]
    assert node.owners.events.count(("a", "LimitsNotLoaded", True)) == 1


async def test_a_process_that_cannot_be_looked_at_says_nothing(node: Node) -> None:
    key = await node.admit()
    await node.look(0, 99)
    assert node.isolation.containers.value[key].injected is None


async def test_an_agent_that_may_not_trace_goes_by_what_processes_entered(node: Node) -> None:
    key = await node.admit()

    def injected() -> bool | None:
        return node.isolation.containers.value[key].injected

    await anyio.to_thread.run_sync(node.untraceable, 7, 1, 5000)
    await anyio.to_thread.run_sync(node.enter, 0, 1, 1, 4999)  # one of before, which had the same PID
    for _ in range(2):
        await node.look(0, 7)
        assert injected() is None  # it may be about to enter itself
    await anyio.to_thread.run_sync(node.enter, 0, 1, 1, 5000)
    await node.look(0, 7)
    assert injected() is True
    await anyio.to_thread.run_sync(node.untraceable, 8, 2, 6000)
    for _ in range(3):
        await node.look(0, 7, 8)
    assert injected() is False
    assert node.publisher.by_fence()["library"] == 0
    assert node.owners.events.count(("a", "LimitsNotLoaded", True)) == 1


async def test_of_processes_that_share_an_entry_nothing_is_said(node: Node) -> None:
    key = await node.admit()
    await anyio.to_thread.run_sync(node.untraceable, 7, 1, 5000)
    await anyio.to_thread.run_sync(node.enter, layout.SLOTS - 1, 0, 2, 0)
    for _ in range(5):
        await node.look(0, 7)
    assert node.isolation.containers.value[key].injected is None


def test_a_file_of_the_same_name_is_not_the_library(tmp_path: Path) -> None:
    library, other = tmp_path / "lib.so", tmp_path / "other"
    library.write_bytes(b"x")
    other.write_bytes(b"y")
    inode = library.stat().st_ino
    for number, (line, expected) in enumerate(
        [
            (mapping(inode, "/usr/lib/gpu-node-agent/lib.so"), True),
            (mapping(other.stat().st_ino, "/usr/lib/gpu-node-agent/lib.so"), False),
            (mapping(inode, "/home/me/lib.so.copy"), False),
            (mapping(inode, "/home/xlib.so"), False),
            (mapping(0, f"[{inode}] /lib.so"), False),
            ("garbage", False),
            ("", False),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "maps").write_text(line + "\n")
        assert loads(number, library, tmp_path, scaled(30)) is expected, line
    os.truncate(tmp_path / "6" / "maps", 8 << 20)
    assert loads(6, library, tmp_path, scaled(30)) is None  # more than is read
    os.truncate(tmp_path / "6" / "maps", 0)
    assert loads(6, library, tmp_path) is None  # as of a process that is just ending


async def test_what_the_library_cannot_count_is_told_to_it(node: Node) -> None:
    key = await node.admit()
    await anyio.to_thread.run_sync(node.loaded, 7)
    folders = node.isolation.folders

    def counted(total: int) -> None:
        descriptor = os.open(folders.path(key, USAGE), os.O_RDWR)
        os.pwrite(descriptor, total.to_bytes(8, "little"), layout.USAGE_HEADER_BYTES + layout.FIGURES_AT)
        os.close(descriptor)

    async def unseen() -> int:
        return (await anyio.to_thread.run_sync(folders.limits, key)).unseen_bytes

    await anyio.to_thread.run_sync(counted, 100 * MIB)
    for _ in range(2):
        await node.look(400 * MIB, 7)
        assert await unseen() == 0  # not stable yet
    await node.look(401 * MIB, 7)
    assert await unseen() == 300 * MIB
    # Counted memory that was freed a moment ago still stands in the driver's figure.
    await anyio.to_thread.run_sync(counted, 0)
    await node.look(400 * MIB, 7)
    assert await unseen() == 300 * MIB
    for _ in range(4):
        await node.look(0)
    assert await unseen() == 0
    # A forged total makes nobody's figure negative.
    await anyio.to_thread.run_sync(counted, (1 << 64) - 1)
    for _ in range(4):
        await node.look(400 * MIB, 7)
    limits = await anyio.to_thread.run_sync(folders.limits, key)
    assert (limits.unseen_bytes, limits.memory_bytes, limits.cores) == (0, CAP, 30)


async def test_owners_are_told_which_fences_hold(node: Node) -> None:
    await node.admit()
    node.publisher.publish()
    assert not node.owners.notes  # the kubelet's record may not show it yet
    await node.look(0)
    await node.look(0)
    ((pod, annotations),) = node.owners.notes
    assert pod == "a"
    assert annotations == {ANNOTATION: f'{{"main":{{"fences":["library","sweep"],"memoryBytes":{CAP}}}}}'}
    assert node.owners.events == [("a", "LimitsApplied", False)]
    assert node.publisher.document(PLACE) == {
        "memoryBytes": CAP,
        "admittedBytes": CAP,
        "fences": ["library", "sweep"],
        "injected": None,
        "avoidable": [],
        "uncounted": [],
        "aboveCap": False,
    }
    assert node.publisher.document(Place("default", "b", "main", GPU)) is None


async def test_status_says_what_is_not_counted(node: Node) -> None:
    key = await node.admit()

    def uncounted() -> list[str]:
        found = (node.publisher.document(PLACE) or {})["uncounted"]
        return [each.partition(":")[0] for each in found]

    assert uncounted() == ["what only a measurement shows, as static variables", "contexts"]
    await node.look(0)
    assert uncounted() == []
    await anyio.to_thread.run_sync(node.process, 8, mapping(1, "/usr/bin/static"))
    await node.look(0, 8)
    assert uncounted() == ["memory of processes without the enforcement library"]
    node.isolation.saw(key, True)
    usage = layout.CountedUsage(0, 0, 0, 0, newer=1, newer_name="cuMemNew")
    node.isolation.counted = {key: usage}
    assert uncounted() == ["what cuMemNew allocates"]
    limits = node.isolation.containers.value[key]
    for build, driver, expected in (
        (limits.about.build, True, []),
        ("", True, ["managed memory"]),
        ("", False, ["all memory"]),
    ):
        about = msgspec.structs.replace(limits.about, build=build, driver=driver)
        node.isolation._become({key: replace(limits, about=about)})
        assert uncounted() == expected


async def test_launches_that_cannot_be_measured_are_told_of(node: Node) -> None:
    key = await node.admit()
    path = node.isolation.folders.path(key, USAGE)

    def count(number: int) -> None:
        at = layout.USAGE_HEADER_BYTES + layout.UNMEASURED_AT
        with path.open("r+b") as file:
            file.seek(at)
            file.write(layout.COUNT.pack(number))

    for number, events in ((0, 0), (1, 1), (1, 1), (3, 2)):
        await anyio.to_thread.run_sync(count, number)
        await node.isolation.tidy()
        await node.look(0)
        assert node.owners.events.count(("a", "ShareUnmeasured", True)) == events
        assert metric(node.publisher, d.CONTAINER_UNMEASURED) == [number]


async def test_without_processes_of_the_host_the_sweep_is_not_said_to_hold(node: Node) -> None:
    await node.admit()
    node.record.publish(Record(unfinished=frozenset({"uid-a"})))
    node.now = PATIENCE_SECONDS
    node.publisher.publish()
    ((_, annotations),) = node.owners.notes
    assert annotations == {ANNOTATION: f'{{"main":{{"fences":["library"],"memoryBytes":{CAP}}}}}'}
    assert not node.publisher.sweeps


async def test_nobody_is_told_of_a_pod_that_has_come_and_gone_unseen(node: Node) -> None:
    """Thirty of them, and 58 writes at once, of a node whose GPUs are measured every half minute."""
    await node.admit()
    node.now = PATIENCE_SECONDS
    node.record.publish(Record())
    node.publisher.publish()
    assert not node.owners.notes
    assert not node.owners.events
    # While nobody can say which pods there are it counts as there.
    for unsure in (Record(away=True), None):
        told = Owners()
        again = Publisher(node.isolation, LimitEvents(node.isolation, told), node.watch)
        node.record.publish(unsure)
        again.publish()
        assert told.events == [("a", "LimitsApplied", False)]
    node.record.publish(Record(unfinished=frozenset({"uid-a"})))
    node.publisher.publish()
    assert node.owners.events == [("a", "LimitsApplied", False)]
    node.record.publish(Record())
    node.publisher.publish()
    assert len(node.owners.notes) == 1


async def test_nobody_is_told_again_after_a_restart(node: Node) -> None:
    await node.admit()
    await node.isolation.start()
    owners = Owners()
    again = Publisher(node.isolation, LimitEvents(node.isolation, owners), node.watch)
    again.take_up()
    node.now = PATIENCE_SECONDS
    again.publish()
    assert not owners.events


def test_the_record_of_a_container_names_its_library() -> None:
    about = About("u", "n", "p", "c", GPU, units(), CAP, 0, "library", "abc")
    isolation = Isolation(
        LimitFolders(Path("/r")), Path("/i"), Path("/s"), Enforcement.REPORT, Cell(None), clock=lambda: 0.0
    )
    assert isolation.libraries.of(about).file == Path("/s/lib/libgna-limits-abc.so")


async def test_who_keeps_the_agent_from_its_files_is_named_once(node: Node) -> None:
    key = await node.admit()
    usage = node.isolation.folders.path(key, USAGE)
    node.isolation.close()  # the agent is killed, and its container executes the file
    await anyio.to_thread.run_sync(shutil.copy, "/bin/sleep", usage)
    # Without pipes: asyncio closes those that nobody reads some turns later, when the loop is gone.
    program = await anyio.open_process([usage, "600"], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    try:
        later = await anyio.to_thread.run_sync(Node, node.root)
        await later.isolation.start()
        for _ in range(3):
            await later.look(0)
            await later.isolation.tidy()
        assert later.owners.events.count(("a", "LimitsAccessRefused", True)) == 1
        (text,) = [each for each in later.owners.messages if "keeps the agent" in each]
        assert "Text file busy; end the pod" in text
        assert metric(later.publisher, d.CONTAINERS_REFUSING) == [1]
    finally:
        program.kill()
        await program.wait()
    later.now += 1
    await later.isolation.tidy()
    assert metric(later.publisher, d.CONTAINERS_REFUSING) == [0]


async def test_a_limit_file_of_another_layout_is_left_alone(node: Node) -> None:
    """An agent that is rolled back finds files of the newer one, under containers that run."""
    key = await node.admit()
    path = node.isolation.folders.path(key, LIMITS)
    content = bytearray(await anyio.Path(path).read_bytes())
    struct.pack_into("<I", content, 8, layout.LAYOUT + 1)
    layout.CRC.pack_into(content, layout.HEADER.size, zlib.crc32(content[: layout.HEADER.size]))

    def write() -> None:
        with path.open("r+b") as file:
            file.write(content)

    await anyio.to_thread.run_sync(write)
    again = Node(node.root)
    await again.isolation.start()
    await anyio.to_thread.run_sync(again.loaded, 7)
    for _ in range(5):
        await again.look(CAP // 2, 7)
    await again.isolation.tidy()
    assert await anyio.Path(path).read_bytes() == content
    assert key in again.isolation.containers.value
