"""The C view of the shared state, generated from the ctypes structures.

Generated, not written twice: the two faces cannot drift. The compiler checks every offset.
"""

import ctypes
import re
from typing import Final, cast

from agent.simulator import state
from agent.simulator.nvml_functions import CALLS

_SCALARS: Final[dict[type, str]] = {
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_char: "char",
}


def header_text() -> str:
    """The text of `sim_layout.h`."""
    parts = [
        "/* Generated from agent/simulator/state.py and calls.py: do not edit. */",
        "#ifndef SIM_LAYOUT_H",
        "#define SIM_LAYOUT_H",
        "#include <stddef.h>",
        "#include <stdint.h>",
        f"#define SIM_MAGIC UINT64_C({state.MAGIC:#x})",
        f"#define SIM_VERSION UINT32_C({state.VERSION:#x})",
    ]
    sizes = [
        "MAX_GPUS",
        "MAX_LINKS",
        "MAX_INSTANCES",
        "MAX_MIG_PROFILES",
        "EVENT_SLOTS",
        "FAULT_SLOTS",
        "PROCESS_SLOTS",
    ]
    sizes += ["CLOCKS", "ACTIVITIES"]
    parts.append(f"#define SIM_NO_RECOVERY_ACTION {state.NO_RECOVERY_ACTION:#x}u")
    parts += [f"#define SIM_{name} {getattr(state, name)}u" for name in sizes]
    for kinds in (state.Presence, state.FaultKind, state.ProcessKind):
        parts += [f"#define SIM_{_snake(kinds.__name__)}_{kind.name} {kind.value}u" for kind in kinds]
    parts.append("enum sim_call {")
    parts += [f"    SIM_{call} = {number}," for number, call in enumerate(CALLS)]
    parts.append("};")
    for structure in state.STRUCTURES:
        parts += structure_text(structure)
    parts.append("#endif")
    return "\n".join(parts) + "\n"


def structure_text(structure: type[ctypes.Structure]) -> list[str]:
    """The C declaration of a ctypes structure, with a compile-time check of its size and every offset."""
    tag = f"struct {_tag(structure)}"
    fields = [(field[0], field[1]) for field in structure._fields_]
    lines = [f"{tag} {{", *(f"    {_declaration(name, kind)};" for name, kind in fields), "};"]
    lines.append(f'_Static_assert(sizeof({tag}) == {ctypes.sizeof(structure)}, "size of {tag}");')
    for name, _ in fields:
        offset = getattr(structure, name).offset
        lines.append(f'_Static_assert(offsetof({tag}, {name}) == {offset}, "{tag}.{name}");')
    return lines


def _declaration(name: str, kind: type) -> str:
    if issubclass(kind, ctypes.Array):
        return f"{_type(cast('type', kind._type_))} {name}[{kind._length_}]"
    return f"{_type(kind)} {name}"


def _type(kind: type) -> str:
    return _SCALARS[kind] if kind in _SCALARS else f"struct {_tag(kind)}"


def _tag(structure: type) -> str:
    return "sim_" + _snake(structure.__name__.removesuffix("State")).lower()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).removesuffix("_Kind").upper()
