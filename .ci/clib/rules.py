"""The library's action at each entry point of the driver: a hook, or the reason why there is none.

A hook is a function of the driver's name in one of the C files, or one that only passes its call on, which
the build writes for every symbol of `FORWARDED`. An entry point without a rule fails the build and its test.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clib.headers import EntryPoint
from clib.wheels import BuildError

SOURCES: Final = Path(__file__).parents[2] / "agent" / "vgpu" / "clib"
HOOKED: Final = ("a.alloc", "a.free", "a.pool", "a.import", "b.launch", "b.graph", "d.resolver")
"""Classes in which every entry point has a hook."""
_CLASSES: Final = {
    "b.sync": r"(Ctx|Stream|Event)(Synchronize|Query)|StreamWait\w+|LaunchHostFunc|StreamAddCallback",
    "d.resolver": "GetProcAddress|GetExportTable",
    "c.report": r"MemGetInfo|DeviceTotalMem|DeviceGetProperties|MemPoolGetAttribute"
    r"|DeviceGetGraphMemAttribute"
    r"|(Mem)?PointerGetAttributes?|MemGetAddressRange|MemGetAllocation\w+|MemRangeGetAttributes?"
    r"|Device(Unr|R)egisterAsync\w+"
    r"|(Mipmapped)?ArrayGet\w+|Array3DGetDescriptor",
    "a.alloc": r"MemAlloc(Pitch|Managed|Async|FromPoolAsync)?|MemCreate|Array(3D)?Create|MipmappedArrayCreate"
    r"|GraphAdd(MemAlloc)?Node|GraphInstantiate\w*|MulticastCreate",
    "a.free": r"MemFree(Async)?|MemRelease|MemUnmap|(Mipmapped)?ArrayDestroy|GraphAddMemFreeNode"
    r"|Graph(Exec)?Destroy(Node)?"
    r"|DeviceGraphMemTrim|DeviceSetGraphMemAttribute",
    "a.pool": r"MemPool\w+|Device(Get|GetDefault|Set)MemPool|Mem(Get|GetDefault|Set)MemPool",
    "a.import": r"Ipc(Open|Close|Get)MemHandle|MemImport\w+|MemExport\w+|MemRetainAllocationHandle"
    r"|\w*ExternalMemory\w*"
    r"|MemGetHandleForAddressRange|Graphics\w+|LogicalEndpoint\w+|Multicast\w+",
    "a.map": r"MemMap(ArrayAsync)?|MemSetAccess|MemGetAccess|MemAddress(Reserve|Free)",
    "a.managed-move": r"MemPrefetch\w+|MemDiscard\w+|MemAdvise|StreamAttachMemAsync",
    "a.host": r"MemAllocHost|MemHost\w+|MemFreeHost",
    "a.code": r"Module\w+|Library\w+|Link\w+|Func\w+|Kernel\w+",
    "a.context": r"Ctx\w+|DevicePrimaryCtx\w+|GreenCtx\w+|DevResource\w+|DevSmResource\w+"
    r"|Stream(Create\w*|Destroy)"
    r"|Event(Create|Destroy)|Checkpoint\w+",
    "b.launch": r"Launch(Grid(Async)?|Kernel(Ex)?|CooperativeKernel\w*)?",
    "b.graph": r"Graph(?!Debug|.*Get|ics)\w+|Stream(Begin|End)\w*[Cc]apture\w*"
    r"|StreamUpdateCaptureDependencies",
    "b.copy": r"Memcpy\w*|Memset\w*|MemBatchDecompressAsync|FabricCpy\w+|StreamBatchMemOp"
    r"|Stream(Write|Wait)Value\d+",
    "c.device": r"Init|DriverGetVersion|Device(Get\w+|Get|CanAccessPeer|ComputeCapability)"
    r"|Stream(Get|Is|Set|Copy)\w+"
    r"|ThreadExchangeStreamCaptureMode|Event(Record\w*|ElapsedTime)|Graph\w*Get\w*|GraphDebugDotPrint",
    "e.other": r"GetError(Name|String)|(TexObject|TexRef|SurfObject|SurfRef|Occupancy|UserObject"
    r"|Coredump|TensorMap|Logs)\w+"
    r"|Param(Set\w+)|FlushGPUDirectRDMAWrites|\w+ExternalSemaphores?(Async)?|Ipc(Get"
    r"|Open)EventHandle|MemGetLocationInfo"
    r"|PointerSetAttribute",
}
"""Class -> names in it, without `cu`. The first match counts."""
_PATTERNS: Final = {name: re.compile(names) for name, names in _CLASSES.items()}

FORWARDED: Final = {
    "MulticastCreate": "tables only: memory is bound to it that is charged already",
    "Multicast": "refers to memory that is charged where it was made",
    "LogicalEndpoint": "refers to memory that is charged where it was made",
    "Graphics": "memory of a graphics API, which the driver made before",
    "ExternalMemoryGetMapped": "a view of what cuImportExternalMemory charged",
    "MemGetHandleForAddressRange": "a further name for memory that stays charged here",
    "MemPoolExportToShareableHandle": "memory stays charged where it was made",
    "MemPoolImportFromShareableHandle": "nothing can be allocated from it; what is opened of it is charged",
    "MemPool": "neither takes memory nor gives any back",
    "DeviceSetMemPool": "neither takes memory nor gives any back",
    "MemSetMemPool": "neither takes memory nor gives any back",
    "GetExportTable": "private tables: what they allocate is settled with the pool or found by the sweep",
    "DeviceSetGraphMemAttribute": "resets high-water marks only",
    "GraphDestroyNode": "what the node would have allocated stays an upper bound",
    "Graph": "takes no memory before the graph is launched",
    "Stream": "begins or ends a capture; what is captured is charged when the graph runs",
}
"""Beginning of a name -> why its hook passes calls on and charges nothing. The longest beginning counts."""

NOTED: Final = {
    r"GraphExec\w*Set\w+|GraphNodeSetEnabled": "gna_price_changed(hGraphExec);",
    r"StreamBegin\w*Capture\w*": "gna_capture_begun(result);",
    r"StreamEnd\w*Capture\w*": "gna_capture_ended(result);",
}
"""Names whose forwarding hook reports the call to the keeper of shares, in C, once it was answered."""

PASSED: Final = {
    "a.map": "address space and rights: the memory is charged by cuMemCreate",
    "a.managed-move": "moves managed memory, which is charged in full when it is made",
    "a.host": "memory of the host; of the GPU it takes page tables only, 0.2 % of it",
    "a.code": "sets up code whose module is charged when it is loaded; more is measured by the agent",
    "a.context": "small objects of a context whose creation is charged",
    "b.copy": "no memory; copy engines are no part of a share, and the observer sees what else copies take",
    "b.sync": "no memory and no work",
    "c.report": "reports memory that the caller has, not of the size of the GPU",
    "c.device": "reports a device, its streams and events",
    "e.other": "neither memory nor work of the GPU",
}
"""Class -> why its entry points that have no hook need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The action at one entry point."""

    entry: EntryPoint
    name: str
    """Of the class."""
    hook: str
    """`own`, `forward`, or empty for none."""
    reason: str
    """Why nothing is charged; empty for hooks of their own."""


def class_of(base: str) -> str:
    """The class of a name such as `cuMemAlloc`. Raises BuildError for one that no rule claims."""
    for name, pattern in _PATTERNS.items():
        if pattern.fullmatch(base.removeprefix("cu")):
            return name
    raise BuildError(f"no rule claims {base}: give it a class in rules.py")


def note_of(base: str) -> str:
    """The side effect of a forwarding hook, in C; empty for none."""
    short = base.removeprefix("cu")
    return next((note for names, note in NOTED.items() if re.fullmatch(names, short)), "")


def own_hooks() -> frozenset[str]:
    """The symbols that the C files define."""
    found: set[str] = set()
    for path in SOURCES.glob("*.c"):
        found.update(re.findall(r"^HOOK\((cu\w+)\)", path.read_text(), flags=re.MULTILINE))
    return frozenset(found)


def rules(entries: Iterable[EntryPoint]) -> list[Rule]:
    """The rule of every entry point. Raises BuildError for one that has none."""
    own = own_hooks()
    return [_rule(entry, own) for entry in entries]


def _rule(entry: EntryPoint, own: frozenset[str]) -> Rule:
    name = class_of(entry.base)
    if entry.symbol in own:
        return Rule(entry=entry, name=name, hook="own", reason="")
    if name in HOOKED:
        short = entry.base.removeprefix("cu")
        beginnings = [beginning for beginning in FORWARDED if short.startswith(beginning)]
        if not beginnings:
            raise BuildError(
                f"{entry.symbol} is in class {name} and has no hook: write one, or say why it charges nothing"
            )
        return Rule(entry=entry, name=name, hook="forward", reason=FORWARDED[max(beginnings, key=len)])
    if name not in PASSED:
        raise BuildError(f"{entry.symbol} has neither a hook nor a reason to have none")
    return Rule(entry=entry, name=name, hook="", reason=PASSED[name])
