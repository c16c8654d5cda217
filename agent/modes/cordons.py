"""GPUs that a person has cordoned: they drain, and are offered in no mode until they are let back.

A node annotation names them, by hand or by `gpu-node-agent cordon`:
`gpu-node-agent.io/cordon: "3, GPU-1b2c...=fan is noisy"`, or JSON with a reason and a time for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import msgspec

from agent.model.gpu import Gpu
from agent.model.modes import GpuMode
from agent.modes.withheld import closed

ANNOTATION: Final = "gpu-node-agent.io/cordon"
LONGEST_REASON: Final = 200
CORDONED: Final = "cordoned"
UUID_PREFIX: Final = "GPU-"


class CordonsUnreadable(Exception):
    """The annotation cannot be read; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """Why a GPU is not offered, and since when (RFC 3339; empty: not known)."""

    reason: str = ""
    since: str = ""

    @property
    def words(self) -> str:
        since = f" since {self.since}" if self.since else ""
        return f"{CORDONED}{since}" + (f": {self.reason}" if self.reason else "")


Cordons = Mapping[str, Cordon]  # by UUID
NO_CORDONS: Final[Cordons] = MappingProxyType({})


def cordoned(
    targets: Mapping[str, GpuMode], gpus: Mapping[str, Gpu], cordons: Cordons
) -> Mapping[str, GpuMode]:
    """The targets, with cordoned GPUs off."""
    return {
        uuid: closed(target, cordons[uuid].words) if uuid in cordons and uuid in gpus else target
        for uuid, target in targets.items()
    }


def decoded(text: str, gpus: Mapping[str, Gpu] | None) -> Cordons:
    """The cordons that an annotation asks for, of GPUs of this node. Raises CordonsUnreadable.

    `gpus` None: whatever it names, by UUID. As JSON, in which the agent writes, it may name GPUs by UUID that
    have left the node: their cordons hold up no other, and count again should they come back.
    """
    named: dict[str, Cordon] = {}
    gone: dict[str, Cordon] = {}
    if text.lstrip().startswith("{"):
        try:
            document = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise CordonsUnreadable(
                f"annotation {ANNOTATION} is no JSON object of objects: {error}"
            ) from error
        for gpu, entry in document.items():
            cordon = Cordon(_line(entry.get("reason")), _line(entry.get("since")))
            away = gpus is not None and gpu not in gpus and gpu.startswith(UUID_PREFIX)
            (gone if away else named)[gpu] = cordon
    else:
        for part in filter(None, (each.strip() for each in text.split(","))):
            gpu, _, reason = part.partition("=")
            named[gpu.strip()] = Cordon(_line(reason))
    if gpus is None:
        return named
    by_name = {str(gpu.index): uuid for uuid, gpu in gpus.items()} | {uuid: uuid for uuid in gpus}
    unknown = sorted(set(named) - set(by_name))
    if unknown:
        known = ", ".join(f"{gpu.index} = {uuid}" for uuid, gpu in gpus.items()) or "none"
        raise CordonsUnreadable(
            f"annotation {ANNOTATION} names {', '.join(unknown)[:LONGEST_REASON]}; this node's GPUs: {known}"
        )
    return {by_name[name]: cordon for name, cordon in named.items()} | gone


def dated(cordons: Cordons, known: Cordons, at: str) -> Cordons:
    """Each with a time: that of `known`, else `at`."""
    return {
        uuid: one if one.since else replace(one, since=known[uuid].since if uuid in known else at)
        for uuid, one in cordons.items()
    }


def encoded(cordons: Cordons) -> str:
    document = {uuid: {"reason": one.reason, "since": one.since} for uuid, one in sorted(cordons.items())}
    return msgspec.json.encode(document).decode()


def _line(text: object) -> str:
    """One line of text, whatever was written there."""
    return " ".join(text.split())[:LONGEST_REASON] if isinstance(text, str) else ""
