"""The CUDA driver API by ctypes, as far as the tests on a GPU need it: no toolkit, only the driver's library.

Signatures, versioned symbols (`_v2`) and numbers are those of cuda.h (CUDA 13.5); handles are pointers, a
device pointer has 64 bits and a device is an int.
"""

import ctypes as c

ATTRIBUTE_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
ATTRIBUTE_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
ILLEGAL_ADDRESS = 700  # CUDA_ERROR_ILLEGAL_ADDRESS

_HANDLE, _POINTER, _SIZE, _UINT = c.c_void_p, c.c_uint64, c.c_size_t, c.c_uint
_SIGNATURES = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (c.POINTER(c.c_int), c.c_int),
    "cuDeviceGetAttribute": (c.POINTER(c.c_int), c.c_int, c.c_int),
    "cuDevicePrimaryCtxRetain": (c.POINTER(_HANDLE), c.c_int),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (c.POINTER(_POINTER), _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetInfo_v2": (c.POINTER(_SIZE), c.POINTER(_SIZE)),
    "cuMemsetD32_v2": (_POINTER, _UINT, _SIZE),
    "cuMemcpyDtoH_v2": (c.c_void_p, _POINTER, _SIZE),
    "cuModuleLoadData": (c.POINTER(_HANDLE), c.c_char_p),
    "cuModuleGetFunction": (c.POINTER(_HANDLE), _HANDLE, c.c_char_p),
    # function, grid x y z, block x y z, bytes of shared memory, stream, parameters, extra
    "cuLaunchKernel": (_HANDLE, *(_UINT,) * 7, _HANDLE, c.POINTER(c.c_void_p), c.POINTER(c.c_void_p)),
}


class CudaError(Exception):
    """A call failed; `code` is the CUresult."""

    def __init__(self, call: str, code: int) -> None:
        self.code = code
        super().__init__(f"{call}: CUDA error {code}")


class Cuda:
    """The first GPU that this process sees, with its primary context current."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = c.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c.c_int
        self._call("cuInit", 0)
        device, context = c.c_int(), _HANDLE()
        self._call("cuDeviceGet", c.byref(device), 0)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", c.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def attribute(self, number: int) -> int:
        """An attribute of the GPU."""
        value = c.c_int()
        self._call("cuDeviceGetAttribute", c.byref(value), number, self._device)
        return value.value

    def memory(self) -> tuple[int, int]:
        """Bytes that are free and bytes that there are, as the driver reports them to this process."""
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """Device memory of `size` bytes; its address."""
        address = _POINTER()
        self._call("cuMemAlloc_v2", c.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Give memory back."""
        self._call("cuMemFree_v2", address)

    def fill(self, address: int, value: int, words: int) -> None:
        """Set `words` 32-bit words."""
        self._call("cuMemsetD32_v2", address, value, words)

    def words(self, address: int, count: int) -> list[int]:
        """Read 32-bit words; waits for all work before."""
        found = (c.c_uint32 * count)()
        self._call("cuMemcpyDtoH_v2", found, address, c.sizeof(found))
        return list(found)

    def kernel(self, ptx: str, name: str) -> "Kernel":
        """A kernel of a PTX text, compiled by the driver."""
        module, function = _HANDLE(), _HANDLE()
        self._call("cuModuleLoadData", c.byref(module), ptx.encode())
        self._call("cuModuleGetFunction", c.byref(function), module, name.encode())
        return Kernel(self, function)

    def synchronise(self) -> None:
        """Wait for all work. Raises CudaError with what a kernel did wrong."""
        self._call("cuCtxSynchronize")

    def launch(self, function: c.c_void_p, blocks: int, threads: int, address: int, number: int) -> None:
        """Start a kernel that takes a 64-bit address and a 32-bit number, on the default stream."""
        parameters = (c.c_uint64(address), c.c_uint32(number))
        pointers = (c.c_void_p * 2)(*(c.addressof(each) for each in parameters))
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)

    def _call(self, name: str, *arguments: object) -> None:
        code: int = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(name, code)


class Kernel:
    """A compiled kernel."""

    def __init__(self, cuda: Cuda, function: c.c_void_p) -> None:
        self._cuda = cuda
        self._function = function

    def run(self, blocks: int, threads: int, address: int, number: int) -> None:
        """Run it to its end: every kernel here takes an address and a 32-bit number."""
        self._cuda.launch(self._function, blocks, threads, address, number)
        self._cuda.synchronise()
