"""Symbols, versions and arguments: each entry point of each release is its own."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from clib.headers import EntryPoint, entry_points
from tests.component.cuda_double.conftest import CACHE
from tests.cuda_double.build import build
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import ProgramError, program

PER_THREAD = 2


@pytest.fixture(scope="module")
def library(release: str) -> Path:
    return build(CACHE, release)


def test_every_symbol_of_the_header_is_exported(library: Path, release: str) -> None:
    text = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in text.splitlines()}
    # Beside the driver's: for programs that live by the clock of the simulated GPUs.
    assert exported - {"gna_sim_now", "gna_sim_wait"} == {point.symbol for point in entry_points(release)}


def test_nothing_newer_than_glibc_2_17_is_needed(library: Path) -> None:
    text = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    versions = {
        tuple(int(part) for part in word.strip("()").removeprefix("GLIBC_").split("."))
        for line in text.splitlines()
        for word in line.split()
        if word.strip("()").startswith("GLIBC_")
    }
    assert max(versions) <= (2, 17)


def test_the_resolver_answers_every_name_version_and_stream(library: Path, release: str) -> None:
    points = entry_points(release)
    driver = ctypes.CDLL(str(library))  # no state is needed before cuInit
    for point in points:
        flags = PER_THREAD if point.stream else 1
        assert resolved(driver, point.base, point.version, flags) == (0, address(driver, point)), point
    known = {(point.base, bool(point.stream), point.version): point for point in points}
    for base, per_thread, version in known:
        older = [
            number
            for name, stream, number in known
            if (name, stream) == (base, per_thread) and number < version
        ]
        if older:
            expected = address(driver, known[base, per_thread, max(older)])
            assert resolved(driver, base, version - 1, 2 if per_thread else 1) == (0, expected)
        elif not per_thread:
            assert resolved(driver, base, version - 1, 1)[1] is None
    assert resolved(driver, "cuNoSuchThing", 13000, 0) == (1, None)


def resolved(driver: ctypes.CDLL, name: str, version: int, flags: int) -> tuple[int, int | None]:
    found, status = ctypes.c_void_p(), ctypes.c_int(0)
    arguments = (name.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags))
    if hasattr(driver, "cuGetProcAddress_v2"):
        driver.cuGetProcAddress_v2(*arguments, ctypes.byref(status))
    elif driver.cuGetProcAddress(*arguments):
        status.value = 1 if found.value is None else 0
    return status.value, found.value


def address(driver: ctypes.CDLL, point: EntryPoint) -> int | None:
    return ctypes.cast(getattr(driver, point.symbol), ctypes.c_void_p).value


def test_every_abi_finds_its_arguments(tmp_path: Path, library: Path, release: str) -> None:
    """Canaries: a call through the wrong ABI shows as another symbol, or other arguments."""
    machine = CudaMachine.create(tmp_path / "state", release=release)
    # Structures by value would need a type each; the two kinds of them are covered by the tests of memory.
    points = [point for point in entry_points(release) if all(map(is_word, point.parameters))]
    assert len(points) > 0.9 * len(entry_points(release))
    with program(library, machine.environment) as app:
        app("init()", "arena = ctypes.create_string_buffer(1 << 16)", "start = ctypes.addressof(arena)")
        start = app("start")
        for at in range(0, len(points), 200):
            part = [point for point in points[at : at + 200] if not point.symbol.startswith("cuGet")]
            sent = [
                (point.symbol, [canary(number, start) for number in range(len(point.parameters))])
                for point in part
            ]
            with machine.recording(probe=True) as calls:
                app(f"[call(symbol, *map(u64, values)) for symbol, values in {sent!r}]")
            assert [call.symbol for call in calls] == [symbol for symbol, _ in sent]
            for call, (symbol, values) in zip(calls, sent, strict=True):
                for got, value in zip(call.arguments, values, strict=True):
                    assert got in (value, value & 0xFFFFFFFF, value & 0xFFFF, value & 0xFF), symbol


def canary(number: int, start: int) -> int:
    """An address that may be written to, another one for each parameter."""
    return start + 256 * (number + 1) + 16 * number


def is_word(parameter: str) -> bool:
    kind = parameter.rsplit(maxsplit=1)[0]
    by_value = ("CUipcMemHandle", "CUipcEventHandle", "CUmemLocation", "CUuuid", "float")
    return "*" in parameter or not kind.startswith(by_value)


def test_calls_are_counted_by_name(tmp_path: Path, library: Path, release: str) -> None:
    machine = CudaMachine.create(tmp_path / "state", release=release)
    with program(library, machine.environment) as app:
        app("init()", "alloc(2)", "alloc(2)", "call('cuMemcpyHtoD_v2', u64(1), u64(2), size(3))")
    assert machine.called() == {
        "cuInit": 1,
        "cuDevicePrimaryCtxRetain": 1,
        "cuCtxSetCurrent": 1,
        "cuMemAlloc_v2": 2,
        "cuMemcpyHtoD_v2": 1,
    }


def test_a_stub_answers_success_only_if_nothing_is_expected_back(
    tmp_path: Path, library: Path, release: str
) -> None:
    machine = CudaMachine.create(tmp_path / "state", release=release)
    with program(library, machine.environment) as app:
        app("init()")
        assert app("call('cuMemsetD8_v2', u64(1), 0, size(1))") == 0
        assert app("call('cuTexRefGetFormat', ctypes.byref(u64()), ctypes.byref(u64()), u64())") == 801


def test_the_driver_says_its_version(tmp_path: Path, library: Path, release: str) -> None:
    machine = CudaMachine.create(tmp_path / "state", release=release)
    with program(library, machine.environment) as app:
        version = app("out('cuDriverGetVersion', kind=ctypes.c_int)")
    assert str(version // 1000) == release.split(".", maxsplit=1)[0]


def test_a_file_of_one_release_is_refused_by_another(tmp_path: Path) -> None:
    machine = CudaMachine.create(tmp_path / "state", release="12")
    with program(build(CACHE, "12"), machine.environment) as app:
        app("init()")
    with program(build(CACHE, "13"), machine.environment) as app:
        assert app("call('cuInit', 0)") == 100, "CUDA_ERROR_NO_DEVICE"


def test_the_runtimes_table_retains_a_context_unseen(tmp_path: Path) -> None:
    machine = CudaMachine.create(tmp_path / "state")
    with program(build(CACHE), machine.environment) as app:
        app("check('cuInit', 0)", "check('cuCtxSetCurrent', u64(runtime_context()))", "alloc(4)")
        assert machine.used() == (300 + 4) << 20
        assert machine.calls("cuDevicePrimaryCtxRetain") == 0, "nobody saw a call"


def test_nothing_is_made_up_of_private_tables(tmp_path: Path) -> None:
    machine = CudaMachine.create(tmp_path / "state")
    for command in ("out('cuGetExportTable', b'0123456789abcdef')", "runtime_context(entry=3)"):
        with program(build(CACHE), machine.environment) as app:
            app("check('cuInit', 0)")
            with pytest.raises(ProgramError, match="ended with -6"):
                app(command)
