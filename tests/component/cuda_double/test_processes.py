"""Several processes on one GPU: what they share, and what is left when one of them dies."""

import signal
import time
from pathlib import Path

import pytest

from tests.component.cuda_double.conftest import Programs
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import ProgramError, program
from tests.pace import scaled

CONTEXT = 300 * MIB


def test_processes_compete_for_one_gpu(machine: CudaMachine, programs: Programs) -> None:
    first, second = programs("init()", "alloc(100)"), programs("init()")
    assert machine.processes() == {first.pid: CONTEXT + 100 * MIB, second.pid: CONTEXT}
    free, total = second("memory()")
    assert free == total - 2 * CONTEXT - 100 * MIB
    second(f"alloc({free // MIB})")
    with pytest.raises(ProgramError, match=r": 2$"):
        first("alloc(1)")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_memory_of_a_dead_process_is_free_at_once(
    machine: CudaMachine, programs: Programs, number: signal.Signals
) -> None:
    first, second = programs("init()", "alloc(8000)"), programs("init()")
    first.kill(number)
    assert machine.processes() == {second.pid: CONTEXT}
    second("alloc(15000)")
    assert machine.peak() == CONTEXT + 15000 * MIB


def test_a_stopped_process_keeps_its_memory(machine: CudaMachine, programs: Programs) -> None:
    stopped = programs("init()", "alloc(64)")
    stopped.signal(signal.SIGSTOP)
    assert machine.processes() == {stopped.pid: CONTEXT + 64 * MIB}
    assert programs("init()", "alloc(64)")("memory()[0]") == (16384 - 600 - 128) * MIB


def test_an_exec_frees_everything(machine: CudaMachine, programs: Programs) -> None:
    app = programs("init()", "alloc(64)")
    app.send("os.execv('/bin/sleep', ['sleep', '60'])")
    program_file = Path(f"/proc/{app.pid}/exe")
    deadline = time.monotonic() + scaled(30)
    while program_file.readlink().name != Path("/bin/sleep").resolve().name:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert machine.used() == 0


def test_a_forked_child_has_no_gpu_and_its_parent_keeps_its_own(
    machine: CudaMachine, programs: Programs
) -> None:
    app = programs("init()", "alloc(64)", "reader, writer = os.pipe()")
    app("fork(\"os.write(writer, bytes([call('cuInit', 0), call('cuCtxSynchronize')]))\")")
    assert app("list(os.read(reader, 2))") == [3, 3], "CUDA_ERROR_NOT_INITIALIZED"
    app("os.wait()")
    assert machine.processes() == {app.pid: CONTEXT + 64 * MIB}


def test_a_child_forked_before_cuda_was_used_is_a_process_of_its_own(
    machine: CudaMachine, programs: Programs
) -> None:
    app = programs("call('cuCtxSynchronize')", "reader, writer = os.pipe()")
    child = app("fork(\"init(); os.write(writer, b'1'); time.sleep(60)\")")
    app("len(os.read(reader, 1))")
    assert machine.processes() == {child: CONTEXT}
    app("init()", f"os.kill({child}, 9)", "os.wait()")
    assert machine.processes() == {app.pid: CONTEXT}


def test_exported_memory_outlives_its_exporter(machine: CudaMachine, programs: Programs) -> None:
    exporter, importer = programs("init()", "handle = create(64)"), programs("init()")
    exporter(
        "fd = ctypes.c_int()",
        "check('cuMemExportToShareableHandle', ctypes.byref(fd), u64(handle), 1, u64())",
    )
    place = f"/proc/{exporter.pid}/fd/{exporter('fd.value')}"
    importer(f"handle = out('cuMemImportFromShareableHandle', ctypes.c_void_p(os.open({place!r}, 0)), 1)")
    assert machine.used() == 2 * CONTEXT + 64 * MIB, "counted once"
    exporter.kill()
    assert machine.used() == CONTEXT + 64 * MIB
    assert importer("memory()[0]") == (16384 - 300 - 64) * MIB
    assert machine.processes() == {importer.pid: CONTEXT + 64 * MIB}
    importer("check('cuMemRelease', u64(handle))")
    assert machine.used() == CONTEXT


def test_memory_opened_by_ipc_is_there_until_it_is_closed(machine: CudaMachine, programs: Programs) -> None:
    exporter, importer = programs("init()", "one = alloc(64)"), programs("init()")
    exporter("ticket = IpcHandle()", "check('cuIpcGetMemHandle', ctypes.byref(ticket), u64(one))")
    importer(f"ticket = IpcHandle(tuple(bytes.fromhex({exporter('bytes(ticket).hex()')!r})))")
    importer("opened = out('cuIpcOpenMemHandle_v2', ticket, ctypes.c_uint(1))")
    exporter("free(one)")
    assert machine.used() == 2 * CONTEXT + 64 * MIB
    importer("check('cuIpcCloseMemHandle', u64(opened))")
    assert machine.used() == 2 * CONTEXT
    with pytest.raises(ProgramError, match=r": 1$"):
        importer("out('cuIpcOpenMemHandle_v2', ticket, ctypes.c_uint(1))")


def test_two_gpus_in_the_order_of_the_environment(tmp_path: Path, driver: Path) -> None:
    uuids = [f"GPU-8f2b1c3d-0000-4000-8000-00000000000{number}" for number in (1, 2)]
    machine = CudaMachine.create(tmp_path / "two", [CudaGpu(uuid=uuid) for uuid in uuids])
    order = {"CUDA_VISIBLE_DEVICES": f"{uuids[1]},0"}
    with program(driver, machine.environment | order) as app:
        app("init(0)")
        assert machine.processes(1) == {app.pid: CONTEXT}
        app("uuid = (ctypes.c_ubyte * 16)()", "check('cuDeviceGetUuid_v2', uuid, 0)")
        assert app("bytes(uuid).hex()") == uuids[1].removeprefix("GPU-").replace("-", "")
        assert app("out('cuDeviceGetCount', kind=ctypes.c_int)") == 2
        assert app("out('cuCtxGetDevice', kind=ctypes.c_int)") == 0


def test_a_reader_sees_the_pids_of_its_own_namespace(machine: CudaMachine, programs: Programs) -> None:
    app = programs("reader, writer = os.pipe()", "ctypes.CDLL(None).unshare(0x20000000)")  # CLONE_NEWPID
    child = app('fork("init(); os.write(writer, bytes([os.getpid()])); time.sleep(60)")')
    assert app("os.read(reader, 1)[0]") == 1
    assert machine.processes() == {child: CONTEXT}
    app(f"os.kill({child}, 9)", "os.wait()")


def test_the_state_is_found_beside_the_library_without_an_environment(tmp_path: Path, driver: Path) -> None:
    copy = tmp_path / driver.name
    copy.write_bytes(driver.read_bytes())
    machine = CudaMachine.create(tmp_path / "cuda-state")
    with program(copy, {}) as app:
        app("init()")
        assert machine.processes() == {app.pid: CONTEXT}


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_state_of_another_layout_is_no_gpu(tmp_path: Path, driver: Path, content: bytes) -> None:
    state = tmp_path / "cuda-state"
    state.write_bytes(content)
    with program(driver, {"GNA_SIM_CUDA_STATE": str(state)}) as app:
        assert app("call('cuInit', 0)") == 100, "CUDA_ERROR_NO_DEVICE"
