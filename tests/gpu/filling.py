"""Memory by every class of allocation, in the words of tests/cuda_double/client.py, for any driver."""

from tests.gpu.kernels import STATIC

PTX = STATIC.encode()
# How a piece is had, as an expression, and how it is given back where it is `one`.
FILL = {
    "linear": ("alloc(8)", "free(one)"),
    "small": ("alloc(0.25)", "free(one)"),
    "pitch": ("pitched(8)", "free(one)"),
    "managed": ("out('cuMemAllocManaged', size(8 * MIB), 1)", "free(one)"),
    "physical": ("create(8)", "check('cuMemRelease', u64(one))"),
    "pool": ("out('cuMemAllocAsync', size(8 * MIB), u64())", "check('cuMemFreeAsync', u64(one), u64())"),
    "array": ("array(2048, 1024)", "check('cuArrayDestroy', u64(one))"),
    "mipmap": ("array(2048, 1024, levels=1)", "check('cuMipmappedArrayDestroy', u64(one))"),
    "graph": ("launched(32)", "check('cuMemFree_v2', u64(one))"),
    "code": ("out('cuModuleLoadData', PTX)", "check('cuModuleUnload', u64(one))"),
}
# Of 0.25, 2 and 32 MiB, less than which no graph takes; all others are of 8.
PIECES = {"small": 4 * 1024, "code": 520, "graph": 32}
HELPERS = f"""
PTX = {PTX!r}
def pitched(megabytes):
    address, pitch = u64(), size(0)
    where = ctypes.byref(address), ctypes.byref(pitch)
    check("cuMemAllocPitch_v2", *where, size(4096), size(megabytes * 256), 4)
    return address.value

def launched(megabytes):
    graph = out("cuGraphCreate", 0)
    address = alloc_node(graph, megabytes)
    ready = out("cuGraphInstantiateWithFlags", u64(graph), u64())
    check("cuGraphLaunch", u64(ready), u64())
    check("cuGraphExecDestroy", u64(ready))
    return address

def tidy():
    check("cuCtxSynchronize")
    check("cuDeviceGraphMemTrim", 0)
"""
