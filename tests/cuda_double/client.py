"""A CUDA program to command: reads Python, one JSON string a line, and answers with values in JSON.

Runs by itself, with nothing of the project imported: `python -I client.py <path of libcuda.so.1>`.
"""

import ctypes
import json
import os
import sys
import time  # noqa: F401 - for the commands
from typing import Any

MIB = 1 << 20
CUDA = ctypes.CDLL(sys.argv[1])
DEFAULT, LEGACY, PER_THREAD = 0, 1, 2


class CudaError(Exception):
    """A call answered something else than CUDA_SUCCESS."""


def u64(value: int = 0) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def call(symbol: str, *arguments: Any) -> int:
    """The result code."""
    return int(getattr(CUDA, symbol)(*arguments))


def check(symbol: str, *arguments: Any) -> None:
    code = call(symbol, *arguments)
    if code:
        raise CudaError(f"{symbol}: {code}")


def out(symbol: str, *arguments: Any, kind: Any = ctypes.c_uint64) -> int:
    """The value that a call puts through its first parameter."""
    value = kind()
    check(symbol, ctypes.byref(value), *arguments)
    return int(value.value)


def size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def init(device: int = 0) -> int:
    """A primary context, current."""
    check("cuInit", 0)
    context = out("cuDevicePrimaryCtxRetain", device)
    check("cuCtxSetCurrent", u64(context))
    return context


def runtime_context(device: int = 0, entry: int = 2) -> int:
    """The primary context, retained as NVIDIA's runtime does: by its private table, not by a name."""
    table = out("cuGetExportTable", bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9"))
    words = ctypes.cast(table, ctypes.POINTER(ctypes.c_uint64))
    retain = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(words[entry])
    context = u64()
    code = retain(ctypes.addressof(context), device)
    if code:
        raise CudaError(f"the runtime's table: {code}")
    return context.value


def alloc(megabytes: float) -> int:
    return out("cuMemAlloc_v2", size(int(megabytes * MIB)))


def free(address: int) -> None:
    check("cuMemFree_v2", u64(address))


def memory() -> tuple[int, int]:
    """(free, total)"""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("maximum", ctypes.c_size_t),
        ("reserved", ctypes.c_ubyte * 56),
    ]


class AllocNode(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS"""

    _fields_ = [
        ("pool", PoolProperties),
        ("access", ctypes.c_void_p),
        ("access_count", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        ("address", ctypes.c_uint64),
    ]


class ArrayShape(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR"""

    _fields_ = [
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("format", ctypes.c_int),
        ("channels", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    ]


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


def properties(device: int = 0, place: int = 1) -> AllocationProperties:
    """Of pinned memory that can be exported; place 1 is the GPU, 2 the host."""
    return AllocationProperties(1, 1, Location(place, device))


def create(megabytes: int, device: int = 0, place: int = 1) -> int:
    wanted = properties(device, place)
    return out("cuMemCreate", size(megabytes * MIB), ctypes.byref(wanted), u64())


def reserve(megabytes: int) -> int:
    return out("cuMemAddressReserve", size(megabytes * MIB), size(0), u64(), u64())


def map_at(address: int, megabytes: int, handle: int) -> None:
    check("cuMemMap", u64(address), size(megabytes * MIB), size(0), u64(handle), u64())


def unmap(address: int, megabytes: int) -> None:
    check("cuMemUnmap", u64(address), size(megabytes * MIB))


def alloc_node(graph: int, megabytes: float) -> int:
    """The address of an allocation by a node."""
    wanted = AllocNode(pool=PoolProperties(1, 0, Location(1, 0)), bytes=int(megabytes * MIB))
    out("cuGraphAddMemAllocNode", u64(graph), None, size(0), ctypes.byref(wanted))
    return int(wanted.address)


def free_node(graph: int, address: int) -> int:
    return out("cuGraphAddMemFreeNode", u64(graph), None, size(0), u64(address))


def array(
    width: int, height: int = 0, depth: int = 0, *, form: int = 0x20, channels: int = 1, levels: int = 0
) -> int:
    shape = ArrayShape(width, height, depth, form, channels, 0)
    if levels:
        return out("cuMipmappedArrayCreate", ctypes.byref(shape), ctypes.c_uint(levels))
    return out("cuArray3DCreate_v2", ctypes.byref(shape))


def resolve(name: str, version: int, flags: int = DEFAULT) -> tuple[int, int | None]:
    """(status, address) of cuGetProcAddress_v2."""
    address, status = ctypes.c_void_p(), ctypes.c_int(-1)
    CUDA.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), version, u64(flags), ctypes.byref(status))
    return status.value, address.value


def function(name: bytes = b"kernel") -> int:
    module = out("cuModuleLoadData", b"image")
    return out("cuModuleGetFunction", u64(module), name)


def launch(handle: int, stream: int = 0) -> None:
    check("cuLaunchKernel", u64(handle), 1, 1, 1, 32, 1, 1, 0, u64(stream), None, None)


def address_of(symbol: str) -> int | None:
    return ctypes.cast(getattr(CUDA, symbol), ctypes.c_void_p).value


def fork(command: str) -> int:
    """The pid of a child that runs a command and ends."""
    child = os.fork()
    if child == 0:
        try:
            run(command, globals())
        finally:
            os._exit(0)
    return child


def run(command: str, names: dict[str, Any]) -> Any:
    """The value of an expression; None for statements."""
    try:
        expression = compile(command, "<command>", "eval")
    except SyntaxError:
        return exec(command, names)
    return eval(expression, names)


def main() -> None:
    names = globals()
    for line in sys.stdin:
        try:
            answer = json.dumps({"value": run(json.loads(line), names)})
        except Exception as error:  # noqa: BLE001 - whatever it is, the test gets it
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
