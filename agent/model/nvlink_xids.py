"""Xids 144 to 150, errors of NVLink 5: their number says little, the rest of the log line says what to do.

`NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 ...)`:
the unit, the severity, and in parentheses intrInfo and errorStatus first. What follows from them: NVIDIA's
Xid catalog, sheet "Xid 144-150 Decode", column of the data centre's recovery action. In that sheet every
fatal error calls for a reset of the GPU, but for two reasons of a link that went down; every other error
calls for nothing, but for those of `_RESTART`, after which the program is to be restarted unless the
driver says more (Xid 154).
"""

import re
from typing import Final

from agent.model.xids import XidClass

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
