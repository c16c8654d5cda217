"""NVIDIA's own libcuda, without a GPU: a program that asks for an entry point gets the library's hook."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clib.headers import entry_points
from clib.rules import rules
from tests.component.caps.conftest import MakeContainer
from tests.cuda_binaries import driver_library
from tests.cuda_double.program import Program, program
from tests.mps_binaries import SUITES

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
