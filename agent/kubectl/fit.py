"""Why a pod does not fit on a node, from the node's annotations: one sentence, or none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from agent.kubectl.view import PAIRS, WHOLE, Document, limits_of


class Want:
    """The request of one container: whole GPUs, or cores and blocks of one GPU in a mode."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.gpus = sum(limits.get(name, 0) for name in WHOLE)
        self.mode, self.cores, self.blocks = "pgpu", 0, 0
        for mode, (core, memory) in PAIRS.items():
            if core in limits or memory in limits:
                self.mode, self.cores, self.blocks = mode, limits.get(core, 0), limits.get(memory, 0)
        # Of vGPU 100, 200 ... cores are so many GPUs with all their memory, whatever memory is asked for.
        self.whole = self.cores // 100 if self.mode == "vgpu" and self.cores % 100 == 0 else 0

    def fault(self) -> str:
        """Why no node can grant it; empty: one could. The rules of agent/model/demand.py."""
        if self.mode == "pgpu" or self.whole:
            return ""
        core, memory = PAIRS[self.mode]
        if self.cores > 100:
            rule = (
                "of one GPU, which has 100" if self.mode == "mps" else "above 100 must be 200, 300 and so on"
            )
            return f"no node grants {self.cores} of {core}: shares {rule}"
        if not self.blocks:
            return f"no node grants {self.cores} of {core} without {memory}"
        if not self.cores and self.mode == "mps":
            return f"no node grants {self.blocks} of {memory} without {core}"
        return ""

    @property
    def size(self) -> tuple[int, int]:
        return (self.cores, self.blocks)

    def words(self) -> str:
        if self.mode == "pgpu":
            return f"{self.gpus} x {WHOLE[0]}"
        return f"{self.cores} {PAIRS[self.mode][0]} and {self.blocks} {PAIRS[self.mode][1]}"


def wants_of(pod: Document) -> list[Want]:
    """App containers and sidecars, which run together; if they ask for nothing, the first init container."""
    spec = pod.get("spec", {})
    inits = spec.get("initContainers") or []
    together = [
        *(each for each in inits if each.get("restartPolicy") == "Always"),
        *spec.get("containers", []),
    ]
    found = [Want(limits) for each in together if (limits := limits_of(each))]
    return found or [Want(limits) for each in inits if (limits := limits_of(each))][:1]


def _rounds_of(pod: Document) -> list[list[Want]]:
    """Containers that run together, then each plain init container, which runs alone: each must fit."""
    inits = pod.get("spec", {}).get("initContainers") or []
    alone = [limits_of(each) for each in inits if each.get("restartPolicy") != "Always"]
    return [wants_of(pod), *([Want(limits)] for limits in alone if limits)]


def lacks(node: Document, pod: Document) -> str:
    """The reason why the pod does not fit on the node; empty: its GPUs are free."""
    if not node["nodeReady"]:
        return "the node is not ready"
    if node["unschedulable"]:
        return "the node is cordoned (unschedulable)"
    selector = pod.get("spec", {}).get("nodeSelector") or {}
    for key, value in selector.items():
        if node["labels"].get(key) != value:
            return f"its label {key} is not {value}"
    if not all(gpu["known"] for gpu in node["gpus"]):
        return "its agent does not say what is free (it is of an earlier version)"
    for wants in _rounds_of(pod):
        reason = next((text for want in wants if (text := want.fault())), "") or _together(wants, node)
        if reason:
            return reason
    return ""


def _together(wants: list[Want], node: Document) -> str:
    """Why containers do not fit side by side; each is put where it fits best, by cores, then by memory."""
    refused = ""
    for at, than in ((0, 1), (1, 0)):
        free: list[dict[str, Any]] = [
            {
                "mode": gpu["mode"],
                "cores": gpu["free"][0],
                "blocks": gpu["free"][1],
                "idle": gpu["used"] == [0, 0],
                "clients": gpu["clients"],
            }
            for gpu in node["gpus"]
            if gpu["offered"] and gpu["cordon"] is None
        ]
        largest = sorted(wants, key=lambda each: (each.gpus, each.whole, each.size[at], each.size[than]))
        reasons = (_take(free, want, node, at) for want in reversed(largest))
        reason = next(filter(None, reasons), "")
        if not reason:
            return ""
        beside = " beside its other containers" if len(wants) > 1 else ""
        refused = refused or reason + beside
    return refused


def _take(free: list[dict[str, Any]], want: Want, node: Document, by: int) -> str:
    """Take what is wanted out of `free`, where the least cores (`by` 0) or memory are left; why not."""
    there = [gpu for gpu in free if gpu["mode"] == want.mode]
    if not there:
        return f"no GPU is offered in mode {want.mode}{_instead(node)}"
    if want.mode == "pgpu" or want.whole:
        need = want.gpus or want.whole
        fit = [gpu for gpu in there if gpu["cores"] > 0 and (want.mode == "pgpu" or gpu["idle"])]
        units = sum(gpu["cores"] for gpu in fit) if want.mode == "pgpu" else len(fit)
        if units < need:
            return f"{units} of {need} GPUs free in mode {want.mode}"
        for gpu in fit:
            taken = min(need, gpu["cores"] if want.mode == "pgpu" else 1)
            need -= taken
            gpu["cores"], gpu["idle"] = (gpu["cores"] - taken if want.mode == "pgpu" else 0), False
            gpu["blocks"] = 0
            if not need:
                break
        return ""
    fit = [gpu for gpu in there if gpu["cores"] >= want.cores and gpu["blocks"] >= want.blocks]
    if fit and not (fit := [gpu for gpu in fit if gpu["clients"] != 0]):
        return "the ceiling of MPS clients is reached on every GPU with room"
    if not fit:
        most = max(there, key=lambda gpu: (min(gpu["cores"], want.cores), gpu["blocks"]))
        return (
            f"no single GPU has {want.cores} cores and {want.blocks} blocks of memory free; "
            f"the nearest has {most['cores']} and {most['blocks']}"
        )
    order = ("blocks", "cores") if by else ("cores", "blocks")
    best = min(fit, key=lambda gpu: [gpu[key] for key in order])
    best["cores"] -= want.cores
    best["blocks"] -= want.blocks
    best["idle"] = False
    if best["clients"]:
        best["clients"] -= 1
    return ""


def _instead(node: Document) -> str:
    modes = Counter(
        "cordoned" if gpu["cordon"] is not None else "unhealthy" if not gpu["healthy"] else str(gpu["mode"])
        for gpu in node["gpus"]
    )
    return " (" + ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items())) + ")" if modes else ""


def fragments(node: Document) -> Document:
    """Free cores of GPUs that are partly used, and the largest free piece: larger requests do not fit."""
    shared = [
        gpu for gpu in node["gpus"] if gpu["mode"] in PAIRS and gpu["offered"] and gpu["cordon"] is None
    ]
    partly = [gpu["free"][0] for gpu in shared if gpu["used"][0]]
    return {
        "freeGpus": sum(
            gpu["free"][0]
            for gpu in node["gpus"]
            if gpu["mode"] == "pgpu" and gpu["offered"] and gpu["cordon"] is None
        ),
        "freeCores": sum(gpu["free"][0] for gpu in shared),
        "inFragments": sum(partly),
        "largest": max((gpu["free"][0] for gpu in shared), default=0),
    }
