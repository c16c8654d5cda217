"""Devices in the kubelet's record that this agent did not hand out."""

from collections.abc import Mapping

from agent.model.holding import Holding, Record
from agent.model.modes import PREFIXES, BadDeviceId, parse


def strangers_by_gpu(pods: Record, gpus: Mapping[int, str]) -> dict[str, tuple[Holding, str]]:
    """A holding, and the device ID in it that no resource of this agent uses, of each GPU that has one.

    Such are the replicas of NVIDIA's plugin (`GPU-...::3`), which this agent did not hand out. `gpus`: the
    UUIDs of the node's GPUs by index, by which that plugin may call whole ones.
    """
    found: dict[str, tuple[Holding, str]] = {}
    known = frozenset(gpus.values())
    for holding in pods.holdings:
        if holding.readable and holding.gpus <= known:
            continue
        ours = holding.resource.startswith("nvidia.com/gpu")
        for text in holding.ids:
            gpu = _gpu_of_stranger(text, gpus) if text.startswith(PREFIXES) or ours else None
            if gpu and gpu not in found:
                found[gpu] = (holding, text)
    return found


def _gpu_of_stranger(text: str, gpus: Mapping[int, str]) -> str | None:
    """The GPU of a device ID that cannot be read; None: it can be, or is of none of these."""
    if text.isascii() and text.isdecimal() and len(text) < 4:
        return gpus.get(int(text))
    named = [uuid for uuid in gpus.values() if text.startswith(uuid) and not text[len(uuid) :][:1].isalnum()]
    try:
        known = parse(text).gpu in gpus.values()
    except BadDeviceId:
        known = False
    return None if known or not named else max(named, key=len)
