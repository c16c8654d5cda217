"""NVIDIA's own libcuda, without a GPU: a program that asks for an entry point gets the library's hook."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clib.headers import PACKAGES, entry_points
from clib.rules import rules
from tests.component.caps.conftest import MakeContainer, Programs
from tests.cuda_binaries import cudart, driver_library
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import Program, program
from tests.mps_binaries import SUITES
from tests.pace import scaled

ASK = """
LIBC = ctypes.CDLL(None)
LIBC.dlsym.restype = LIBC.dlvsym.restype = ctypes.c_void_p
HANDLE = ctypes.c_void_p(CUDA._handle)

def asked(points):
    answers = []
    for symbol, base, version, stream in points:
        found = [LIBC.dlsym(HANDLE, symbol.encode()), LIBC.dlvsym(HANDLE, symbol.encode(), b"libcuda.so.1")]
        first, flags = ctypes.c_void_p(), 2 if stream else 1
        code = CUDA.cuGetProcAddress(base.encode(), ctypes.byref(first), version, u64(flags))
        status, second = resolve(base, version, flags)
        answers.append([found + [first.value, second], [code, status]])
    return answers
"""


@contextmanager
def _asking(driver: Path, environment: dict[str, str]) -> Iterator[Program]:
    with program(driver, environment) as started:
        started(ASK, "import json; call('cuInit', 0)")
        yield started


# Where the runtime keeps what it found, and where the mapped files lie.
LOOK = """
import struct

def holdings(name):
    lines = [line.split() for line in open('/proc/self/maps')]
    found, after = set(), 0
    with open('/proc/self/mem', 'rb') as memory:
        for span, rights, _, _, _, *path in lines:
            start, end = (int(each, 16) for each in span.split('-'))
            path = ' '.join(path)
            own = path.endswith(name)
            if rights.startswith('rw') and (own or (not path and start == after)):
                memory.seek(start)
                found |= {word for (word,) in struct.iter_unpack('<Q', memory.read(end - start))}
            after = end if own or (not path and start == after) else 0
    return found
"""
# Private tables that NVIDIA's runtime asks for, with their bytes; then one that it is refused.
TABLES = {
    "6bd5fb6c5bf4e74a8987d93912fd9df9": 96,
    "a094798c2e742e7493f20800200c0a66": 56,
    "42d85a8123f6cb478298f6e78a3aecdc": 24,
}
REFUSED = "f8cff95121468b4eb9e2fb469e7c0dd9"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", PACKAGES)
def test_real_cudart_holds_hooks(release: str, container: MakeContainer) -> None:
    """Of the entry points that NVIDIA's runtime takes from NVIDIA's driver, it gets the library's hooks.

    How far both go without a GPU: the runtime looks for every function, then hears that there is no device,
    or that driver 550 is too old for it.
    """
    ends = 35 if release == "13" else 100  # cudaErrorInsufficientDriver, cudaErrorNoDevice
    driver, runtime = driver_library("550"), cudart(release)
    hooked = [rule.entry for rule in rules(entry_points("13")) if rule.hook]
    points = [(each.symbol, each.base, each.version, each.stream) for each in hooked]
    with _asking(driver, container().environment) as app:
        app(LOOK, "import struct")
        app("own = ctypes.CDLL(os.environ['LD_PRELOAD'])", f"cudart = ctypes.CDLL({str(runtime)!r})")
        assert app("cudart.cudaGetDeviceCount(ctypes.byref(u64()))") == ends
        app(f"kept = holdings({runtime.name!r})", f"points = {points!r}")
        app("hooks = {ctypes.cast(getattr(own, point[0]), ctypes.c_void_p).value for point in points}")
        held: int = app("len(kept & hooks)")
    with _asking(driver, {}) as bare:
        bare(LOOK, "import struct", f"cudart = ctypes.CDLL({str(runtime)!r})")
        assert bare("cudart.cudaGetDeviceCount(ctypes.byref(u64()))") == ends
        bare(f"kept = holdings({runtime.name!r})", f"answers = asked({points!r})")
        plain: int = bare("len(kept & {one for given, _ in answers for one in given if one})")
    # As many as it finds hookable functions of the driver where nobody stands between.
    assert held == plain > 100


# What the runtime asks for that only NVIDIA's own driver can answer; nothing here forges it.
PROOF = {
    "11.8": "private table d4082055bde6704b8d34ba123c66e1f2",
    "12": "private table 263e88607cd2614392f6bbd5006dfa7e",
    "13": "entry 12 of a private table was called",
}
FIRST_CALLS = [
    "cudaMalloc(b'12345678', c_size_t(1 << 20))",
    "cudaDriverGetVersion(b'1234')",
    "cudaFree(None)",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", FIRST_CALLS)
@pytest.mark.parametrize("release", PACKAGES)
def test_real_cudart_asks_for_the_drivers_proof(
    release: str, call: str, container: MakeContainer, machine: CudaMachine, driver: Path
) -> None:
    """So far it comes on the double, whatever call is its first: to no context, and to no memory."""
    code = f"from ctypes import *; CDLL({str(driver)!r}); CDLL({str(cudart(release))!r}).{call}"
    made = container()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        check=False,
        env={**machine.environment, **made.environment},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert PROOF[release] in done.stderr
    assert done.returncode == -signal.SIGABRT
    assert made.charged() == machine.used() == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("major", SUITES)
def test_private_tables_are_those_of_the_driver(major: str, programs: Programs) -> None:
    ask = f"""
def lengths():
    found = []
    for name in {list(TABLES)!r}:
        table = out('cuGetExportTable', bytes.fromhex(name))
        found.append(ctypes.cast(table, ctypes.POINTER(ctypes.c_uint64))[0])
    return found + [call('cuGetExportTable', ctypes.byref(u64()), bytes.fromhex({REFUSED!r}))]
"""
    with program(driver_library(major), {}) as real:
        answers = real(ask, "lengths()")
    double = programs(None)(ask, "lengths()")
    if major == "535":  # its table of the runtime is one entry shorter
        answers[0] += 8
    assert answers == double == [*TABLES.values(), 1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("major", SUITES)
def test_real_libcuda_routes_every_hook(major: str, container: MakeContainer) -> None:
    driver, made = driver_library(major), rules(entry_points("13"))
    points = [(each.entry.symbol, each.entry.base, each.entry.version, each.entry.stream) for each in made]
    question = f"asked(json.loads({json.dumps(json.dumps(points))}))"
    with _asking(driver, {}) as bare:
        plain: list[Any] = bare(question)
    with _asking(driver, container().environment) as capped:
        answers: list[Any] = capped(question)
        capped("own = ctypes.CDLL(os.environ['LD_PRELOAD'])")
        hooked = [rule.entry.symbol for rule in made if rule.hook]
        hooks = dict(
            zip(
                hooked,
                capped(f"[ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in {hooked!r}]"),
                strict=True,
            )
        )
    ours = set(hooks.values())
    routed = 0
    for rule, (before, codes), (after, codes_now) in zip(made, plain, answers, strict=True):
        symbol = rule.entry.symbol
        assert codes == codes_now, symbol
        assert [each is None for each in before] == [each is None for each in after], symbol
        given = [each for each in after if each is not None]
        if rule.hook:
            assert set(given) <= ours, symbol
            # By its own name it is the hook of this very ABI; by its base name that of what the driver chose.
            assert after[0] in (None, hooks[symbol]), symbol
            routed += bool(given)
        else:
            assert not ours & set(given), symbol
    assert routed > 180  # 535 has the fewest
