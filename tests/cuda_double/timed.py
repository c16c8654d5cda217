"""Programs that take part in the virtual time of the simulated GPUs."""

from typing import Any, Final

from tests.cuda_double.program import Program

# A thread takes part in virtual time until it ends; what it made is its result.
HELP: Final = """
import threading
CUDA.gna_sim_now.restype = ctypes.c_uint64
now = lambda: CUDA.gna_sim_now() // 1000000
sleep = lambda ms: CUDA.gna_sim_wait(None, 0, u64(CUDA.gna_sim_now() + ms * 1000000))
def event(stream=0):
    made = out('cuEventCreate', 0)
    check('cuEventRecord', u64(made), u64(stream))
    return made
def elapsed(begin, end):
    value = ctypes.c_float()
    check('cuEventElapsedTime', ctypes.byref(value), u64(begin), u64(end))
    return value.value
def timed(work):
    results = []
    def whole():
        init()
        results.append(work())
    thread = threading.Thread(target=whole)
    thread.start()
    thread.join()
    return results[0]
"""


def together(programs: list[Program], *functions: str) -> list[Any]:
    """The results of functions that run at once, one in each program."""
    for each, text in zip(programs, functions, strict=True):
        each(text)
        each.send("timed(work)")
    return [each.receive() for each in programs]


def kernels(count: int, milliseconds: int) -> str:
    """A function: how the clock stands when that many kernels have run."""
    return (
        "def work():\n"
        f"    kernel = function(b'work_{milliseconds}ms')\n"
        f"    for _ in range({count}): launch(kernel)\n"
        "    check('cuCtxSynchronize')\n"
        "    return now()"
    )
