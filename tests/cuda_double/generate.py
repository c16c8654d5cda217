"""Writes the C text that depends on the release of cuda.h: gates, prototypes of the models, routes."""

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

from clib.headers import EntryPoint
from tests.cuda_double import layout, layout_time
from tests.nvml_double.header import structure_text

_MODEL: Final = re.compile(r"^CUresult model_(cu\w+)\(", re.MULTILINE)
_NAME: Final = re.compile(r"(\w+)$")
# They answer before cuInit.
_EARLY: Final = re.compile(
    r"cu(Init|DriverGetVersion|GetErrorString|GetErrorName|GetProcAddress|GetExportTable)"
)
# A wrapper may ask them on its way to the call that a test wants to see; they answer while others only note.
_REPORT: Final = re.compile(
    r"cu(CtxGetDevice|CtxGetCurrent|DeviceGet|DeviceGetCount|DeviceGetUuid|DeviceTotalMem|MemGetInfo|StreamIsCapturing"
    r"|StreamGetCaptureInfo)"
)
# Parameters through which the caller gets something back: not const, not plain data of the caller.
_ANSWER: Final = re.compile(r"^(?!const\b)(?!void \*\w)[\w ]+\*+")


def models(sources: Iterable[str]) -> frozenset[str]:
    """The symbols that have a model of their own in the C files."""
    return frozenset(symbol for text in sources for symbol in _MODEL.findall(text))


def checksum(points: Sequence[EntryPoint]) -> int:
    """Distinguishes the symbols of one release from those of another."""
    return zlib.crc32("\n".join(point.symbol for point in points).encode())


def layout_header() -> str:
    """The text of `cuda_layout.h`."""
    lines = [
        "/* Generated from layout.py: do not edit. */",
        "#ifndef CUDA_LAYOUT_H",
        "#define CUDA_LAYOUT_H",
        "#include <stddef.h>",
        "#include <stdint.h>",
        f"#define SIM_CUDA_MAGIC UINT64_C({layout.MAGIC:#x})",
        f"#define SIM_CUDA_VERSION UINT32_C({layout.VERSION:#x})",
        f"#define SIM_CUDA_LOCK_BASE UINT64_C({layout.LOCK_BASE:#x})",
        f'#define SIM_CUDA_STATE_VARIABLE "{layout.STATE_VARIABLE}"',
        f'#define SIM_CUDA_STATE_BESIDE_LIBRARY "{layout.STATE_BESIDE_LIBRARY}"',
        f"#define SIM_CUDA_KINDS {len(layout.MemoryKind)}u",
    ]
    sizes = ("DEVICES", "SLOTS", "SHARED", "HOLDERS", "LIMITS", "FAULTS", "RECORDS", "ARGUMENTS")
    lines += [f"#define SIM_CUDA_{name} {getattr(layout, name)}u" for name in sizes]
    times = ("LANES", "ITEMS", "STAMPS", "TENANTS", "TASKS", "SLICE_NS", "WINDOW_NS", "WINDOWS")
    lines += [f"#define SIM_CUDA_{name} {getattr(layout_time, name)}u" for name in times]
    lines += [f"#define SIM_CUDA_CLOCK_{mode.name} {mode.value}u" for mode in layout_time.ClockMode]
    lines += [f"#define SIM_CUDA_TASK_{state.name} {state.value}u" for state in layout_time.TaskState]
    lines += [f"#define SIM_CUDA_MEMORY_{kind.name} {kind.value}u" for kind in layout.MemoryKind]
    lines += [f"#define SIM_CUDA_FAULT_{action.name} {action.value}u" for action in layout.FaultAction]
    lines += [f"#define SIM_CUDA_WATCH_{bit.name} {bit.value}u" for bit in layout.Watch]
    for structure in layout.STRUCTURES:
        lines += structure_text(structure)
    return "\n".join([*lines, "#endif", ""])


def models_header(points: Sequence[EntryPoint], modelled: frozenset[str]) -> str:
    """The text of `models.h`: which symbols this release has, and the prototypes of their models."""
    lines = ["/* Generated from cuda.h: do not edit. */"]
    lines += [f"#define HAVE_{point.symbol} 1" for point in points]
    lines += [
        f"CUresult model_{point.symbol}({_declared(point)});" for point in points if point.symbol in modelled
    ]
    return "\n".join(lines) + "\n"


def gates(points: Sequence[EntryPoint], modelled: frozenset[str]) -> str:
    """The text of `gates.c`."""
    lines = [
        "/* Generated from cuda.h: do not edit. */",
        "#pragma GCC visibility push(default)",
        "#define __CUDA_API_VERSION_INTERNAL 1",
        "#include <cuda.h>",
        "#pragma GCC visibility pop",
        "#include <cudaTypedefs.h>",
        '#include "double.h"',
        "#define THREAD_STREAM(stream) ((stream) == NULL ? CU_STREAM_PER_THREAD : (stream))",
        "static inline int plain(uint32_t symbol) {",
        "    struct sim_cuda_machine *machine = __atomic_load_n(&cuda_machine, __ATOMIC_ACQUIRE);",
        "    if (machine == NULL || __atomic_load_n(&machine->watch, __ATOMIC_RELAXED)) {",
        "        return 0;",
        "    }",
        "    __atomic_fetch_add(&machine->calls[symbol], 1, __ATOMIC_RELAXED);",
        "    return 1;",
        "}",
    ]
    for number, point in enumerate(points):
        lines += _gate(number, point, modelled)
    lines += ["const char *const symbol_names[] = {", *(f'    "{point.symbol}",' for point in points), "};"]
    lines.append(f"const uint32_t symbol_count = {len(points)}u, symbols_checksum = {checksum(points):#x}u;")
    # The type that NVIDIA gives to a name and version must be that of the symbol: the compiler sees to it.
    lines += [
        f"PFN_{point.base}_v{point.version}{point.stream} const checked_{number} = {point.symbol};"
        for number, point in enumerate(points)
    ]
    lines.append("const struct route routes[] = {")
    order = sorted(points, key=lambda point: (point.base, bool(point.stream), point.version))
    lines += [
        f'    {{"{point.base}", {point.version}, {int(bool(point.stream))}, (void *){point.symbol}}},'
        for point in order
    ]
    lines += ["};", f"const uint32_t route_count = {len(order)}u;", ""]
    return "\n".join(lines)


def _gate(number: int, point: EntryPoint, modelled: frozenset[str]) -> list[str]:
    names = _names(point)
    flags = 1 if _EARLY.fullmatch(point.base) else 2 if _REPORT.fullmatch(point.base) else 0
    arguments = ", ".join(f"{{&{name}, sizeof({name})}}" for name in names) or "{0}"
    return [
        f"CUresult CUDAAPI {point.symbol}({_declared(point)}) {{",
        f"    if (!plain({number})) {{",
        f"        const struct argument gate_arguments[] = {{{arguments}}};",
        "        CUresult gate_result;",
        f"        if (gate({number}, {flags}, gate_arguments, {len(names)}, &gate_result)) {{",
        "            return gate_result;",
        "        }",
        "    }",
        *(f"    (void){name};" for name in names),
        f"    return {_answer(point, names, modelled)};",
        "}",
    ]


def _answer(point: EntryPoint, names: Sequence[str], modelled: frozenset[str]) -> str:
    if point.symbol in modelled:
        return f"model_{point.symbol}({', '.join(names)})"
    plain = point.symbol.removesuffix(point.stream)
    if point.stream and plain in modelled:
        passed = [
            f"THREAD_STREAM({name})" if parameter.startswith("CUstream ") else name
            for parameter, name in zip(point.parameters, names, strict=True)
        ]
        return f"model_{plain}({', '.join(passed)})"
    # A stub. It says that it did its work only if the caller gets nothing back that it would have to make up.
    if any(_ANSWER.match(parameter) for parameter in point.parameters):
        return "CUDA_ERROR_NOT_SUPPORTED"
    return "CUDA_SUCCESS"


def _declared(point: EntryPoint) -> str:
    return ", ".join(point.parameters) or "void"


def _names(point: EntryPoint) -> list[str]:
    found = [_NAME.search(parameter) for parameter in point.parameters]
    return [match[1] for match in found if match is not None]
