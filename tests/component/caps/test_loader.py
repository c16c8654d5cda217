"""The hooked dlsym, as programs, wrappers and drivers ask it: at any time, from anywhere."""

from pathlib import Path

import pytest

from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.native import shared
from tests.cuda_double.build import build
from tests.cuda_double.fixtures import CACHE
from tests.cuda_double.machine import MIB, CudaMachine

ASK = """
libc = ctypes.CDLL(None)
libc.dlsym.restype, libc.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
driver = ctypes.c_void_p(CUDA._handle)
def error_after(name):
    libc.dlerror()
    found = libc.dlsym(driver, name)
    return found is not None, libc.dlerror() is not None
"""


def test_a_name_that_is_found_leaves_no_error(container: MakeContainer, programs: Programs) -> None:
    # A driver that is older than the library lacks some of a name's forms, which the library asks for.
    program = programs(container(), ASK, driver=build(CACHE, "11.8"))
    for name in ("cuGraphExecUpdate", "cuCtxCreate_v2", "cuMemAlloc_v2"):
        assert program(f"error_after({name.encode()!r})") == [True, False]
    assert program("error_after(b'cuGraphAddNode_v3')") == [False, True]
    assert program("error_after(b'no_such_function')") == [False, True]


WRAPPER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static int inside, again;
static int pass_on(const char *name, void *one, size_t two) {
    int (*behind)(void *, size_t) = (int (*)(void *, size_t))dlsym(RTLD_NEXT, name);
    if (inside) {
        again = 1;
        return 998;
    }
    inside = 1;
    int result = behind == NULL ? 999 : behind(one, two);
    inside = 0;
    return again ? 998 : result;
}
int cuMemAlloc_v2(void *one, size_t two) { return pass_on("cuMemAlloc_v2", one, two); }
int cuda_like(void *one, size_t two) { return pass_on("cuda_like", one, two); }
"""
WRAPPED = "int cuda_like(void *one, unsigned long two) { (void)one; return (int)two; }"


@pytest.mark.timeout(300)
def test_a_wrapper_finds_what_is_behind_it(
    container: MakeContainer, machine: CudaMachine, programs: Programs, tmp_path: Path
) -> None:
    made = container(1024)
    wrapper, wrapped = shared(tmp_path, "wrapper.so", WRAPPER), shared(tmp_path, "wrapped.so", WRAPPED)
    program = programs(made, LD_PRELOAD=f"{made.library} {wrapper} {wrapped}")
    program(f"init(); wrapper = ctypes.CDLL({str(wrapper)!r})")
    # A name that is none of the library's, and one that is.
    assert program("wrapper.cuda_like(None, size(77))") == 77
    assert program("wrapper.cuMemAlloc_v2(ctypes.byref(u64()), size(64 * MIB))") == 0
    assert made.charged() == machine.used() == 364 * MIB


ASKING_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
int cuMemAlloc_v2(void) { return 77; }
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *found = strcmp(name, "cuMemAlloc") ? 0 : dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
    *status = *found == 0;
    return *found == 0 ? 500 : 0;
}
"""


@pytest.mark.timeout(300)
def test_a_driver_may_ask_the_loader_itself(
    container: MakeContainer, programs: Programs, tmp_path: Path
) -> None:
    program = programs(container(), driver=shared(tmp_path, "libcuda.so.1", ASKING_DRIVER))
    program(
        "import threading; found = []",
        "asking = threading.Thread(target=lambda: found.append(resolve('cuMemAlloc', 12000)), daemon=True)",
        "asking.start(); asking.join(30)",
    )
    assert program("found[0][0]") == 0
