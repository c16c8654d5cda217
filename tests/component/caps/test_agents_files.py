"""The files that the agent makes for a container are those that the library in it goes by."""

import os
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import pytest

from agent.kit.tasks import Cell
from agent.kubelet.wire import Mount
from agent.model.holding import Record
from agent.model.pod import VGPU
from agent.telemetry import definitions as d
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import About, LimitFolders, key_of
from agent.vgpu.limits import Enforcement, context_bytes
from agent.vgpu.publishing import Publisher
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch
from tests.component.caps.conftest import Programs
from tests.component.caps.container import Container
from tests.component.caps.native import shared
from tests.component.caps.test_resolver import NEWER
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import Program
from tests.unit.vgpu.test_watch import Owners, metric

GPU = CudaGpu().uuid
UNITS = tuple(f"{GPU}::m{number}" for number in range(4))
BYPASSED = "LimitsBypassed"
CAP = len(UNITS) * VGPU.block_bytes


def room(root: Path, library: Path, product: str = "", policy: Enforcement = Enforcement.STRICT) -> Isolation:
    record: Cell[Record | None] = Cell(Record((), ()))
    return Isolation(
        LimitFolders(root / "run"),
        library,
        root / "state",
        policy,
        record,
        expected=lambda _: context_bytes(product),
    )


def mounted(root: Path, mounts: tuple[Mount, ...]) -> Container:
    """Its files as a container sees them, below other paths."""
    folder = root / "container"
    folder.mkdir()
    for each in mounts:
        os.link(each.host_path, folder / Path(each.container_path).name)
    library = next(each for each in mounts if each.container_path.endswith(".so"))
    (folder / "libgna-limits.so").symlink_to(Path(library.container_path).name)
    return Container(folder)


def fill(program: Program) -> int:
    """Allocate until the driver's answer is no, in the finest steps; bytes."""
    program("count = 0\nwhile not call('cuMemAlloc_v2', ctypes.byref(u64()), size(2 * MIB)): count += 1")
    return int(program("count")) * 2 * MIB


@pytest.mark.timeout(600)
async def test_a_cap_of_the_agent_holds_and_follows_a_resize(
    tmp_path: Path, library: Path, machine: CudaMachine, programs: Programs
) -> None:
    agent = room(tmp_path, library)
    await agent.start()
    assert agent.libraries.problem is None
    admission = await agent.admit(About("uid", "default", "pod", "main", GPU, UNITS, CAP, 30))
    container = await anyio.to_thread.run_sync(mounted, tmp_path, admission.mounts)
    start = partial(programs, container, "init()")
    program = await anyio.to_thread.run_sync(start)
    before = machine.used()
    first = await anyio.to_thread.run_sync(fill, program)
    assert container.charged() == CAP  # to the byte
    assert await anyio.to_thread.run_sync(program, "memory()") == [0, CAP]
    # Another agent, after an update, finds the container and raises its cap while the program runs.
    later = room(tmp_path, library)
    await later.start()
    key = key_of(UNITS)
    about = later.containers.value[key].about
    grown = msgspec.structs.replace(
        about, memory_bytes=CAP + 2 * VGPU.block_bytes, grown=(f"{GPU}::m8", f"{GPU}::m9")
    )
    await later.resize(key, grown)
    assert await anyio.to_thread.run_sync(fill, program) == 2 * VGPU.block_bytes
    assert machine.used() == before + first + 2 * VGPU.block_bytes
    usage = await anyio.to_thread.run_sync(later.folders.usage, key)
    assert usage is not None
    assert usage.total_bytes == CAP + 2 * VGPU.block_bytes
    # What only the driver sees counts as used, too.
    await anyio.to_thread.run_sync(partial(later.folders.change, key, unseen_bytes=64 * MIB))
    await later.resize(
        key, msgspec.structs.replace(about, memory_bytes=CAP + 3 * VGPU.block_bytes, grown=grown.grown)
    )
    assert await anyio.to_thread.run_sync(fill, program) == VGPU.block_bytes - 64 * MIB
    # What is charged and not there does not.
    await anyio.to_thread.run_sync(partial(later.folders.change, key, forgiven_bytes=32 * MIB))
    assert await anyio.to_thread.run_sync(program, "memory()") == [32 * MIB, CAP + 3 * VGPU.block_bytes]
    assert await anyio.to_thread.run_sync(fill, program) == 32 * MIB
    assert await anyio.to_thread.run_sync(program, "memory()") == [0, CAP + 3 * VGPU.block_bytes]


@pytest.mark.timeout(600)
async def test_contexts_count_by_default(
    tmp_path: Path, library: Path, machine: CudaMachine, programs: Programs
) -> None:
    """Nobody measures anything, as in the default chart: the table counts."""
    machine.state.devices[0].context_bytes = 210 * MIB
    agent = room(tmp_path, library, "NVIDIA A10")
    await agent.start()
    admission = await agent.admit(About("uid", "default", "pod", "main", GPU, UNITS, CAP, 30))
    container = await anyio.to_thread.run_sync(mounted, tmp_path, admission.mounts)
    start = partial(programs, container, "check('cuInit', 0)")
    for _ in range(3):
        program = await anyio.to_thread.run_sync(start)
        await anyio.to_thread.run_sync(program, "init()", "alloc(100)")
    program = await anyio.to_thread.run_sync(start)
    code = "call('cuDevicePrimaryCtxRetain', ctypes.byref(u64()), 0)"
    assert await anyio.to_thread.run_sync(program, code) == 2
    assert machine.used() <= container.charged() <= CAP


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", [Enforcement.LIBRARY, Enforcement.STRICT])
async def test_newer_entry_point_is_told(
    policy: Enforcement, tmp_path: Path, library: Path, programs: Programs
) -> None:
    agent, owners = room(tmp_path, library, policy=policy), Owners()
    events = LimitEvents(agent, owners)
    publisher = Publisher(agent, events, LimitWatch(agent, events, tmp_path / "proc"))
    await agent.start()
    admission = await agent.admit(About("uid", "default", "pod", "main", GPU, UNITS, CAP, 30))
    container = await anyio.to_thread.run_sync(mounted, tmp_path, admission.mounts)
    driver = await anyio.to_thread.run_sync(shared, tmp_path, "libcuda.so.1", NEWER)
    program = await anyio.to_thread.run_sync(partial(programs, container, driver=driver))
    refused = await anyio.to_thread.run_sync(program, "resolve('cuMemAlloc', 99000)[1] is None")
    assert refused is (policy is Enforcement.STRICT)
    for _ in range(2):
        await agent.tidy()
        publisher.publish()
    said = [text for text, each in zip(owners.messages, owners.events, strict=True) if each[1] == BYPASSED]
    assert len(said) == (not refused)
    assert all("cuMemAlloc" in text for text in said)
    assert metric(publisher, d.CONTAINER_NEWER) == [1]
