"""Errors between the agent and NVML, as exceptions of this room."""

from enum import IntEnum


class NvmlCode(IntEnum):
    """Return codes of NVML that the agent distinguishes (`nvmlReturn_t` in nvml.h)."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


class NvmlError(Exception):
    """A call into NVML failed; `code` is NVML's own, `call` the function that said so."""

    def __init__(self, code: int, call: str, message: str | None = None) -> None:
        self.code = code
        self.call = call
        super().__init__(message or f"NVML {call} failed: {code_name(code)} ({code})")


class NvmlLibraryMissing(NvmlError):
    """libnvidia-ml.so.1 is not on this node, or cannot be loaded."""


class NvmlDriverMismatch(NvmlError):
    """The loaded library does not fit the running kernel module; only a restart of the process can help."""


class NvmlNotSupported(NvmlError):
    """This GPU or this driver has no such function: not a fault."""


class NvmlGpuLost(NvmlError):
    """The GPU fell off the bus, is lost, or is not there any more."""


class NvmlLeftOver(NvmlError):
    """A call failed half-way, and what it had made is still there."""


class NvmlHung(NvmlError):
    """A call did not return within its deadline; its thread was given up."""


def code_name(code: int) -> str:
    try:
        return NvmlCode(code).name.lower().replace("_", " ")
    except ValueError:
        return "unknown code"


def error_for(code: int, call: str, detail: str | None = None) -> NvmlError:
    """The exception of this room for NVML's return code `code` of function `call`."""
    kind: type[NvmlError]
    match code:
        case NvmlCode.LIBRARY_NOT_FOUND:
            kind = NvmlLibraryMissing
        case NvmlCode.LIB_RM_VERSION_MISMATCH:
            kind = NvmlDriverMismatch
        case NvmlCode.NOT_SUPPORTED | NvmlCode.FUNCTION_NOT_FOUND:
            kind = NvmlNotSupported
        case NvmlCode.GPU_IS_LOST | NvmlCode.GPU_NOT_FOUND | NvmlCode.NOT_FOUND:
            kind = NvmlGpuLost
        case _:
            kind = NvmlError
    return kind(code, call, detail)
