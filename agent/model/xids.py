"""The meaning of the driver's Xid numbers for a GPU.

Numbers, names and the vendor's advice: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), the
column of immediate actions. What follows from them for scheduling is this agent's decision; where it
differs from the catalog, the reason stands beside it. docs/health.md shows the whole table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class XidClass(Enum):
    APPLICATION = "application"  # a program's fault; the GPU serves the next one
    RESET = "needs_reset"
    REBOOT = "needs_reboot"  # of the machine, or hands on its hardware
    CONTAINED = "contained"  # hardware, but the damage ended with one program
    INFORMATIONAL = "informational"


class Verdict(Enum):
    """The effect of one occurrence on the GPU."""

    COUNT = "count"  # nothing but a counter
    SUSPECT = "suspect"  # still offered, watched until the quiet time is over
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a kind of fault is judged.

    `recovers`: quiet time and passing probes are enough. Otherwise the agent must have seen that the GPU
    was reset (it was gone and came back, its counters fell, the driver asks for it no more, the machine was
    booted), or a person clears it. `open`: the table leaves open what has to be done; where the driver says
    that nothing has (`agent.model.health`), that is the answer.
    """

    title: str
    kind: XidClass
    verdict: Verdict
    recovers: bool
    quiet_seconds: float
    open: bool = False


# Seconds without a new event before a GPU is trusted again, by class.
QUIET_SECONDS: Final[Mapping[XidClass, float]] = {
    XidClass.APPLICATION: 0.0,
    XidClass.RESET: 300.0,
    XidClass.REBOOT: 300.0,
    XidClass.CONTAINED: 300.0,
    XidClass.INFORMATIONAL: 0.0,
}

_VERDICTS: Final = {
    XidClass.APPLICATION: Verdict.COUNT,
    XidClass.RESET: Verdict.UNHEALTHY,
    XidClass.REBOOT: Verdict.UNHEALTHY,
    XidClass.CONTAINED: Verdict.SUSPECT,
    XidClass.INFORMATIONAL: Verdict.COUNT,
}

_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO_ENGINES = (60, 68, 82, 83, 84, 86, 88, 89, 96, 97, 98, 99, *range(100, 106), 139, 142)

_APPLICATION: Final = {
    8: "GPU stopped processing",
    11: "invalid or corrupted push buffer",
    13: "graphics engine exception",
    25: "invalid or illegal push buffer",
    31: "GPU memory page fault",
    32: "invalid or corrupted push buffer",
    **dict.fromkeys(_COPY_ENGINES, "copy engine exception"),
    43: "GPU stopped processing a channel",
    # Cleanup after another fault: that one has its own number.
    45: "preemptive cleanup after an earlier error",
    **dict.fromkeys(_VIDEO_ENGINES, "video or image engine exception"),
    69: "graphics engine class error",
    80: "corrupted data sent to the GPU",
    # The catalog advises a reset. In the field it is a program's fault (NVIDIA's own device plugin
    # passes over it): a GPU that really hangs reports 46, 62 or 119 besides.
    109: "context switch timeout",
    159: "CHI non-data error",
}

_RESET: Final = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    144: "NVLink SAW error",
    145: "NVLink RLW error",
    146: "NVLink TLW error",
    147: "NVLink TREX error",
    148: "NVLink NVLPW_CTRL error",
    149: "NVLink NETIR error",
    150: "NVLink MSE error",
    155: "NVLink software-defined error",
    156: "resource retirement event",
    158: "GPU fatal timeout",
    167: "PCIe fatal timeout",
    169: "internal micro-controller halt (SEC2)",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}

_REBOOT: Final = {
    54: "auxiliary power is not connected",
    79: "GPU has fallen off the bus",
    151: "key rotation error",
}

_CONTAINED: Final = {94: "contained memory error"}

_INFORMATIONAL: Final = {
    14: "fake error",
    37: "driver firmware error",
    38: "driver firmware watchdog",
    44: "graphics engine fault during context switch",
    63: "row remapping or page retirement recorded",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    78: "virtual GPU start error",
    92: "high rate of corrected ECC errors",
    93: "InfoROM wear limit exceeded",
    106: "SMBPBI test message",
    107: "SMBPBI test message",
    108: "NVLink remote translation error",
    121: "C2C error, corrected",
    137: "NVLink privilege error",
    141: "CUDA fast path error",
    152: "DLA SMMU error",
    153: "DLA timeout",
    # Follows another Xid and says what the driver recommends now; the event carries no more than that.
    154: "recommended recovery action changed",
    157: "resource retirement failure",
    160: "channel retirement event",
    161: "channel retirement failure",
    162: "power smoothing engaged again",
    163: "power smoothing disengaged",
    164: "power smoothing hardware near its end of life",
    165: "power smoothing hardware at its end of life",
    # Confidential computing only, and without an action in the catalog: the driver's verdict decides.
    166: "NVLink traffic before encryption was set up",
    168: "reduced memory capacity",
    170: "NVLink interrupt in confidential computing",
}

# Faults whose end a probe can witness: ECC counters stand still and nothing is pending; a link
# that was trained again raises no more Xids. For the others NVML answers as if nothing had happened.
_WITNESSED: Final = frozenset({74, 136, 140, *range(144, 151), 155, 156, 171, 172})

# Numbers whose action the catalog makes depend on more than the number: on other Xids beside it (48, 171,
# 172), on the rest of the log line (144 to 150, `agent.model.xids`).
_OPEN: Final = frozenset({48, *range(144, 151), 171, 172})

UNKNOWN_TITLE: Final = "not in NVIDIA's public catalog"


def _rules() -> dict[int, Rule]:
    table: dict[int, Rule] = {}
    for kind, titles in (
        (XidClass.APPLICATION, _APPLICATION),
        (XidClass.RESET, _RESET),
        (XidClass.REBOOT, _REBOOT),
        (XidClass.CONTAINED, _CONTAINED),
        (XidClass.INFORMATIONAL, _INFORMATIONAL),
    ):
        for number, title in titles.items():
            recovers = kind not in (XidClass.RESET, XidClass.REBOOT) or number in _WITNESSED
            table[number] = Rule(
                title, kind, _VERDICTS[kind], recovers, QUIET_SECONDS[kind], open=number in _OPEN
            )
    return table


XIDS: Final[Mapping[int, Rule]] = _rules()

# A number that nobody knows is taken seriously, but not for ever.
UNKNOWN: Final = Rule(
    UNKNOWN_TITLE,
    XidClass.RESET,
    Verdict.UNHEALTHY,
    recovers=True,
    quiet_seconds=QUIET_SECONDS[XidClass.RESET],
    open=True,
)


def default_verdict(kind: XidClass) -> Verdict:
    """The effect of a fault of this class, unless its rule says otherwise."""
    return _VERDICTS[kind]


# Xids 144 to 150, errors of NVLink 5: their number says little, the rest of the log line says what to do.
#
# `NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 01 (0x021425c6 0x00000000 ...)`: the
# unit, the severity, and in parentheses intrInfo and errorStatus first. What follows from them: NVIDIA's Xid
# catalog, sheet "Xid 144-150 Decode", column of the data centre's recovery action. In that sheet every fatal
# error calls for a reset of the GPU, but for two reasons of a link that went down; every other error calls
# for nothing, but for those of `_RESTART`, after which the program is to be restarted unless the driver says
# more (Xid 154).

NUMBERS: Final = frozenset(range(144, 151))

_LINE: Final = re.compile(
    r"^[\s,]*(?:pid=[^,]*,\s*name=[^,]*,\s*)?"
    r"(?P<unit>[A-Za-z0-9_ /]+?)\s+(?:Link )?(?P<severity>Fatal|Nonfatal|Non-fatal)\b"
    r"[^(\[]*[(\[](?P<info>0x[0-9a-fA-F]{1,8})(?:[ ,]+(?P<status>0x[0-9a-fA-F]{1,8}))?"
)
# errorStatus of errors that end the programs they touched.
_RESTART: Final = {
    "RLW_REMAP": frozenset({0x1, 0x2, 0x4, 0x8, 0x10, 0x20}),
    "RLW_SRC_TRACK": frozenset({0x4, 0x8}),
}
_LINK_DOWN: Final = frozenset({"NETIR_LINK_EVT", "NETIR_LINK_DOWN"})
# intrInfo bits 20 to 25, why a link went down: taken down by software, by the host.
_DOWN_ON_PURPOSE: Final = frozenset({0b100110, 0b101000})


def class_of(number: int, rest: str) -> XidClass | None:
    """The kind of fault that a log line reports, `rest` being its text behind the number; None: unclear."""
    if number not in NUMBERS:
        return None
    found = _LINE.match(rest)
    if found is None:
        return None
    unit, info, status = found["unit"], int(found["info"], 16), int(found["status"] or "0", 16)
    if found["severity"] == "Fatal":
        on_purpose = unit in _LINK_DOWN and (info >> 20) & 0x3F in _DOWN_ON_PURPOSE
        return XidClass.INFORMATIONAL if on_purpose else XidClass.RESET
    return XidClass.CONTAINED if status in _RESTART.get(unit, frozenset()) else XidClass.INFORMATIONAL
