"""Builds the modes of the table: by a module `build_<mode>` of this package, or as their plugins alone.

The first is for modes that need more rooms than plugins do. A new mode takes a row of the table and a module
`agent.<mode>.plugin`, and no change here.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from agent.app.mode_parts import ModeContext, ModeModule, ModeParts
from agent.lists.context import module_of
from agent.model.modes import OFFERED_MODES, Mode


async def build_modes(context: ModeContext) -> Mapping[Mode, ModeParts]:
    """All modes of the table, allowed by the configuration or not: that may change while the agent runs."""
    return {mode: await _build(mode, context) for mode in OFFERED_MODES}


async def _build(mode: Mode, context: ModeContext) -> ModeParts:
    name = f"{__package__}.build_{mode.value}"
    if find_spec(name):
        return await cast("ModeModule", import_module(name)).build(context)
    return ModeParts(module_of(mode).build(context.plugins))
