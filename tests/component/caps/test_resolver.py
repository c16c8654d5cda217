"""Who asks for an entry point gets the hook of the very ABI that the driver would have given."""

import json
from pathlib import Path

import pytest

from agent.vgpu import layout
from clib.headers import EntryPoint, entry_points
from clib.rules import rules
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import shared
from tests.cuda_double.build import build
from tests.cuda_double.fixtures import CACHE
from tests.cuda_double.machine import CudaMachine

OWN = "own = ctypes.CDLL(os.environ['LD_PRELOAD'])"
ROUTES = """
routes = []
for base, version, flag in json.loads(asked):
    second = resolve(base, version, flag)[1] if modern else None
    first = ctypes.c_void_p()
    CUDA.cuGetProcAddress(base.encode(), ctypes.byref(first), version, u64(flag))
    routes.append((second, first.value))
"""


@pytest.mark.timeout(300)
def test_resolver_routes_every_abi(
    release: str, container: MakeContainer, machine: CudaMachine, programs: Programs
) -> None:
    made = rules(entry_points(release))
    program = programs(container(), OWN, driver=build(CACHE, release))
    program(f"asked = {json.dumps(json.dumps([_asked(rule.entry) for rule in made]))}")
    modern = any(rule.entry.symbol == "cuGetProcAddress_v2" for rule in made)
    program(f"modern = {modern}", ROUTES)
    by_resolver = program("routes")
    symbols = [rule.entry.symbol for rule in made]
    hooked = [rule.entry.symbol for rule in made if rule.hook]
    program(f"symbols = {symbols!r}; hooked = {hooked!r}")
    by_name = dict(zip(symbols, program("[address_of(name) for name in symbols]"), strict=True))
    hooks = dict(
        zip(
            hooked,
            program("[ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in hooked]"),
            strict=True,
        )
    )
    # One hook stands for one ABI.
    assert len(set(hooks.values())) == len(hooks) == len(hooked) > 100
    for rule, (second, first) in zip(made, by_resolver, strict=True):
        symbol = rule.entry.symbol
        answers = [by_name[symbol], first, *([second] if modern else [])]
        if rule.hook:
            assert set(answers) == {hooks[symbol]}, symbol
        else:
            assert not set(answers) & set(hooks.values()), symbol


def _asked(entry: EntryPoint) -> tuple[str, int, int]:
    return entry.base, entry.version, 2 if entry.stream else 1


NEWER = """
int cuMemAlloc_v9(void) { return 77; }
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    (void)name, (void)flags;
    *found = version < 99000 ? 0 : (void *)cuMemAlloc_v9;
    *status = version < 99000;
    return version < 99000 ? 500 : 0;
}
"""


@pytest.fixture
def newer_driver(tmp_path: Path) -> Path:
    """A driver whose cuMemAlloc is newer than all that the library knows."""
    return shared(tmp_path, "libcuda.so.1", NEWER)


@pytest.mark.timeout(300)
def test_a_newer_abi_passes_and_is_counted(
    container: MakeContainer, programs: Programs, newer_driver: Path
) -> None:
    made = container()
    program = programs(made, driver=newer_driver)
    status, address = program("resolve('cuMemAlloc', 99000)")
    assert (status, program(f"ctypes.CFUNCTYPE(ctypes.c_int)({address})()")) == (0, 77)
    (usage,) = layout.read_usage(made.usage.read_bytes())
    assert (usage.newer, usage.newer_name) == (1, "cuMemAlloc")


@pytest.mark.timeout(300)
def test_a_newer_abi_is_refused_where_strict(
    container: MakeContainer, programs: Programs, newer_driver: Path
) -> None:
    program = programs(container(strict=True), driver=newer_driver)
    # CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    assert program("resolve('cuMemAlloc', 99000)") == [2, None]


def test_other_libraries_keep_their_symbols(container: MakeContainer, programs: Programs) -> None:
    program = programs(container())
    program("libc = ctypes.CDLL(None); libc.strlen.restype = ctypes.c_size_t")
    assert program("libc.strlen(b'four')") == 4
    program("libc.dlsym.restype = ctypes.c_void_p")
    # RTLD_NEXT, asked by libffi for us, and a name that nobody has.
    assert program("libc.dlsym(ctypes.c_void_p(-1), b'no_such_function')") is None
