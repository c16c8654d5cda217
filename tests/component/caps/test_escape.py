"""Attempts of a tenant to get more than its cap; the numbers are those of docs/security.md.

Those that are tried on hardware, too, are in tests/gpu/escapes.py.
"""

import shutil
import sys
from pathlib import Path

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import Container, make
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.gpu import escapes
from tests.gpu.escapes import WAYS, contained

# Fills the GPU with pieces of 64 MiB and says how many it got.
GREEDY = (
    "import ctypes, sys\n"
    "cuda = ctypes.CDLL(sys.argv[1]); out = ctypes.c_uint64()\n"
    "assert cuda.cuInit(0) == 0\n"
    "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(out), 0) == 0 and cuda.cuCtxSetCurrent(out) == 0\n"
    "got = 0\n"
    "while cuda.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(64 << 20)) == 0: got += 1\n"
    "print(got)\n"
)
FITS = (1024 - 300) // 64
UNLIMITED = (16384 - 300) // 64


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """An /etc for containers that preloads what lies at /mnt."""
    return escapes.etc(tmp_path / "etc", "libgna-limits.so")


def _granted(
    container: Container, etc: Path, machine: CudaMachine, driver: Path, way: list[str], script: str = GREEDY
) -> int:
    """How many pieces a program gets that is started in this way."""
    shutil.copy(driver, container.folder / "libcuda.so.1")
    # Beside the driver, since the environment may be emptied.
    state = container.folder / "cuda-state"
    state.touch()
    command = [*way, sys.executable, "-I", "-S", "-c", script, "/mnt/libcuda.so.1"]
    mount = f"mount --bind {machine.path} /mnt/cuda-state"
    return int(contained(command, container.folder, etc, mount))


@pytest.mark.parametrize("way", WAYS)
def test_escape(way: str, container: MakeContainer, etc: Path, machine: CudaMachine, driver: Path) -> None:
    if "loader" in way:
        # The loader takes no program by its name alone.
        assert Path(WAYS[way][0]).exists()
    made = container(1024)
    assert _granted(made, etc, machine, driver, WAYS[way]) == FITS
    assert machine.peak() == (300 + FITS * 64) * MIB


def test_the_trial_itself_is_without_a_cap(
    container: MakeContainer, etc: Path, machine: CudaMachine, driver: Path
) -> None:
    (etc / "ld.so.preload").unlink()
    assert _granted(container(1024), etc, machine, driver, ["env"]) == UNLIMITED


def test_escape_5_visible_devices(
    tmp_path: Path, library: Path, driver: Path, container: MakeContainer
) -> None:
    gpus = [CudaGpu(), CudaGpu(uuid="GPU-8f2b1c3d-0000-4000-8000-000000000002", bus_id="0000:1a:00.0")]
    machine = CudaMachine.create(tmp_path / "two", gpus)
    made = make(tmp_path / "both", library, (1024, 2048), gpus=gpus)
    started = Programs(machine, driver)
    with started.stack:
        turned = f"{gpus[1].uuid},{gpus[0].uuid}"
        caps = [started(made, "init()")("memory()[1] // MIB")]
        caps += [
            started(made, "init()", CUDA_VISIBLE_DEVICES=visible)("memory()[1] // MIB")
            for visible in ("1", turned)
        ]
    assert caps == [1024, 2048, 2048]


def test_escape_10_a_copy_of_the_driver_at_another_path(
    container: MakeContainer, machine: CudaMachine, programs: Programs, tmp_path: Path, driver: Path
) -> None:
    copy = tmp_path / "other.so"
    shutil.copy(driver, copy)
    program = programs(container(1024), "init()", driver=copy)
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(800 * MIB))") == 2


def test_escape_16_memory_of_a_sibling_container_is_charged(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    one, two = container(1024), container(1024)
    giver, taker = programs(one, "init()"), programs(two, "init()")
    giver("handle = create(400)")
    giver("at = out('cuMemExportToShareableHandle', u64(handle), 1, u64(), kind=ctypes.c_int)")
    taker(f"fd = os.open(f'/proc/{giver.pid}/fd/{giver('at')}', os.O_RDWR)")
    taker("handle = out('cuMemImportFromShareableHandle', ctypes.c_void_p(fd), 1)")
    taker("at = reserve(400); map_at(at, 400, handle)")
    assert two.charged() == 700 * MIB
    assert taker("call('cuMemAlloc_v2', ctypes.byref(u64()), size(400 * MIB))") == 2
    taker("unmap(at, 400); check('cuMemRelease', u64(handle))")
    assert two.charged() == 300 * MIB


def test_memory_of_the_same_container_is_charged_once(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(2048)
    giver, taker = programs(made, "init()"), programs(made, "init()")
    giver("handle = IpcHandle(); at = alloc(400); check('cuIpcGetMemHandle', ctypes.byref(handle), u64(at))")
    taker(f"handle = IpcHandle((ctypes.c_ubyte * 64)(*{giver('list(handle.bytes)')}))")
    taker("at = out('cuIpcOpenMemHandle_v2', handle, 1)")
    assert made.charged() == machine.used() == 1000 * MIB
    stranger = container(2048)
    third = programs(stranger, "init()")
    third(f"handle = IpcHandle((ctypes.c_ubyte * 64)(*{giver('list(handle.bytes)')}))")
    third("at = out('cuIpcOpenMemHandle_v2', handle, 1)")
    assert stranger.charged() == 700 * MIB
    third("check('cuIpcCloseMemHandle', u64(at))")
    assert stranger.charged() == 300 * MIB


def test_escape_17_a_flood_of_managed_memory(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    program = programs(container(1024), "init()")
    program("[out('cuMemAllocManaged', size(64 * MIB), 1) for _ in range(11)]")
    assert program("call('cuMemAllocManaged', ctypes.byref(u64()), size(64 * MIB), 1)") == 2
    assert machine.peak() == (300 + 11 * 64) * MIB


# The driver in a namespace of the loader of its own, or before all else that is loaded.
DLMOPEN = GREEDY.replace(
    "cuda = ctypes.CDLL(sys.argv[1]);",
    "libc = ctypes.CDLL(None); libc.dlmopen.restype = ctypes.c_void_p;"
    "cuda = ctypes.CDLL(None, handle=libc.dlmopen(ctypes.c_long(-1), sys.argv[1].encode(), 2));",
)
DEEPBIND = GREEDY.replace("ctypes.CDLL(sys.argv[1])", "ctypes.CDLL(sys.argv[1], mode=2 | 8)")


def test_escape_9_deepbind(container: MakeContainer, etc: Path, machine: CudaMachine, driver: Path) -> None:
    assert _granted(container(1024), etc, machine, driver, ["env"], DEEPBIND) == FITS
    assert machine.peak() == (300 + FITS * 64) * MIB


def test_escape_9_dlmopen(container: MakeContainer, etc: Path, machine: CudaMachine, driver: Path) -> None:
    """The loader preloads nothing into a namespace of its own, and the driver's copy there is another one.

    So this one gets through, as docs/security.md says. A change of that is to be written down there.
    """
    made = container(1024)
    assert _granted(made, etc, machine, driver, ["env"], DLMOPEN) == UNLIMITED
    assert made.charged() == 0


def test_a_reset_primary_context_is_still_charged_while_it_is_retained(
    container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = container(1024)
    program = programs(made, "init()", "alloc(600)")
    program("check('cuDevicePrimaryCtxReset_v2', 0)")
    assert made.charged() == 300 * MIB  # what was allocated in it is gone
    program("init()", "kept = alloc(600)")
    assert made.charged() == machine.used() == 900 * MIB
    # One of the two that retain it leaves: neither context nor memory is gone.
    program("check('cuDevicePrimaryCtxRelease_v2', 0)")
    assert machine.used() == 900 * MIB
    assert program("call('cuMemAlloc_v2', ctypes.byref(u64()), size(600 * MIB))") == 2
    assert machine.peak() <= 1024 * MIB
    program("check('cuDevicePrimaryCtxRelease_v2', 0)")
    assert made.charged() == machine.used() == 0
