"""Why a pod does not fit on a node, from the node's annotations: one sentence, or none.

The rules are the extender's (agent/extender/pod_demand.py, agent/model/pod.py); a test compares both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from agent.kubectl.view import PAIRS, WHOLE, Document, limits_of

MOST_STEPS = 2000  # of one search for GPUs: a share tried on a GPU is one

FreeOnGpu = dict[str, Any]


class NeverFits(Exception):
    """A request that no node can grant; the text says why."""


class Want:
    """The request of one container, or of several that inherit units: whole GPUs, or a share of one GPU."""

    def __init__(self, mode: str, cores: int, blocks: int, whole: int = 0, containers: int = 1) -> None:
        self.mode, self.cores, self.blocks, self.whole = mode, cores, blocks, whole
        self.containers = containers  # each is a client of the GPU's MPS server

    @property
    def size(self) -> tuple[int, int, int]:
        return (self.whole, self.cores, self.blocks)

    def words(self) -> str:
        if self.mode == "pgpu":
            return f"{self.whole} x {WHOLE[0]}"
        return f"{self.cores} {PAIRS[self.mode][0]} and {self.blocks} {PAIRS[self.mode][1]}"


def share_of(mode: str, limits: dict[str, int]) -> Want | None:
    """A container's request in a mode; None: it has none. Raises NeverFits."""
    core, memory = PAIRS[mode]
    cores, blocks = limits.get(core, 0), limits.get(memory, 0)
    if not cores and not blocks:
        return None
    if cores > 100 and (mode == "mps" or cores % 100):
        rule = "of one GPU, which has 100" if mode == "mps" else "above 100 must be 200, 300 and so on"
        raise NeverFits(f"no node grants {cores} of {core}: shares {rule}")
    # Of vGPU 100, 200 ... cores are so many GPUs with all their memory, whatever memory is asked for.
    if mode == "vgpu" and cores and cores % 100 == 0:
        return Want(mode, cores, blocks, cores // 100)
    if not blocks:
        raise NeverFits(f"no node grants {cores} of {core} without {memory}")
    if not cores and mode == "mps":
        raise NeverFits(f"no node grants {blocks} of {memory} without {core}")
    return Want(mode, cores, blocks)


def containers_of(pod: Document) -> list[tuple[bool, dict[str, int]]]:
    """Whether each is a plain init container, and its limits; in the order of the kubelet's admission."""
    spec = pod.get("spec", {})
    inits = [(each.get("restartPolicy") != "Always", each) for each in spec.get("initContainers") or []]
    apps = [(False, each) for each in spec.get("containers") or []]
    return [(init, limits) for init, each in (*inits, *apps) if (limits := limits_of(each))]


def wants_of(pod: Document) -> list[Want]:
    """All that must be free at once. Raises NeverFits."""
    containers = containers_of(pod)
    found = [want for mode in PAIRS for want in _shares(mode, containers)]
    if gpus := sum(_gpus(name, containers) for name in WHOLE):
        found.append(Want("pgpu", 0, 0, gpus))
    return found


def _gpus(resource: str, containers: list[tuple[bool, dict[str, int]]]) -> int:
    """GPUs that the kubelet takes for a pod: later containers reuse those of plain init containers."""
    reusable = taken = 0
    for init, limits in containers:
        asked = limits.get(resource, 0)
        taken += max(0, asked - reusable)
        reusable = max(reusable, asked) if init else max(0, reusable - asked)
    return taken


def _shares(mode: str, containers: list[tuple[bool, dict[str, int]]]) -> Iterator[Want]:
    """Shares of a mode. Plain init containers and those that inherit their units lie on the same GPUs."""
    cores = blocks = whole = span = tied = 0
    spare = [0, 0]  # cores and blocks that the next container is given unasked
    for init, limits in containers:
        want = share_of(mode, limits)
        if want is None:
            continue
        inherits = bool((want.cores and spare[0]) or (want.blocks and spare[1]))
        if not init and not inherits:
            yield want
            continue
        if inherits and want.whole < span > 1:
            raise NeverFits(f"no node grants a container {want.cores} cores of {span} GPUs that it inherits")
        tied += 1
        cores += max(0, want.cores - spare[0])
        blocks += max(0, want.blocks - spare[1])
        whole = max(whole, want.whole)
        if init:
            span = max(span, want.whole, 1)
            spare = [max(spare[0], want.cores), max(spare[1], want.blocks)]
        else:
            spare = [max(0, spare[0] - want.cores), max(0, spare[1] - want.blocks)]
    if whole and cores > whole * 100:
        raise NeverFits(f"no node grants {cores} cores on {whole} GPUs that init containers hand on")
    if tied:
        yield Want(mode, cores, blocks, whole, tied)


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
    try:
        wants = sorted(wants_of(pod), key=lambda each: each.size, reverse=True)
    except NeverFits as error:
        return str(error)
    if node["gpus"] and all(gpu["mode"] == "dra" for gpu in node["gpus"]):
        return "its GPUs are devices of DRA, judged by kube-scheduler"
    # What does not fit alone is the better reason.
    for want in wants:
        if reason := _take(_free(node), want, node):
            return reason
    return _together(wants, node) if len(wants) > 1 else ""


def _free(node: Document) -> list[FreeOnGpu]:
    return [
        {
            "mode": gpu["mode"],
            "cores": gpu["free"][0],
            "blocks": gpu["free"][1],
            "idle": gpu["used"] == [0, 0] and gpu["free"][0] == gpu["total"][0],
            "clients": gpu["clients"],
        }
        for gpu in node["gpus"]
        if gpu["offered"] and gpu["cordon"] is None
    ]


def _together(wants: list[Want], node: Document) -> str:
    """Why containers do not fit side by side; empty: there is a way."""
    free = _free(node)
    shares = [want for want in wants if not want.whole]
    reasons = [_take(free, want, node) for want in wants if want.whole]
    if not any(reasons) and _placed(free, shares, [MOST_STEPS]):
        return ""
    reasons += [_take(free, want, node) for want in shares]
    return (
        next(filter(None, reasons), "no way was found to place its containers")
        + " beside its other containers"
    )


def _placed(free: list[FreeOnGpu], shares: list[Want], steps: list[int]) -> bool:
    """Whether all shares have a place; going back where the rest has none."""
    if not shares:
        return True
    want, tried = shares[0], set()
    for gpu in sorted(_fitting(free, want), key=lambda each: (each["cores"], each["blocks"])):
        alike = (gpu["cores"], gpu["blocks"], gpu["clients"])
        if alike in tried:
            continue
        tried.add(alike)
        steps[0] -= 1
        if steps[0] < 0:
            return False
        before = dict(gpu)
        _use(gpu, want)
        if _placed(free, shares[1:], steps):
            return True
        gpu.update(before)
    return False


def _fitting(free: list[FreeOnGpu], want: Want) -> list[FreeOnGpu]:
    return [
        gpu
        for gpu in free
        if gpu["mode"] == want.mode
        and gpu["cores"] >= want.cores
        and gpu["blocks"] >= want.blocks
        and (gpu["clients"] is None or gpu["clients"] >= want.containers)
    ]


def _use(gpu: FreeOnGpu, want: Want) -> None:
    gpu.update(cores=gpu["cores"] - want.cores, blocks=gpu["blocks"] - want.blocks, idle=False)
    if gpu["clients"] is not None:
        gpu["clients"] -= want.containers


def _take(free: list[FreeOnGpu], want: Want, node: Document) -> str:
    """Take what is wanted out of `free`, where the least is left; why not."""
    there = [gpu for gpu in free if gpu["mode"] == want.mode]
    if not there:
        return f"no GPU is offered in mode {want.mode}{_instead(node)}"
    if want.whole:
        return _take_whole(there, want)
    if fit := _fitting(free, want):
        _use(min(fit, key=lambda gpu: (gpu["cores"], gpu["blocks"])), want)
        return ""
    if any(gpu["cores"] >= want.cores and gpu["blocks"] >= want.blocks for gpu in there):
        return "the ceiling of MPS clients is reached on every GPU with room"
    most = max(there, key=lambda gpu: (min(gpu["cores"], want.cores), gpu["blocks"]))
    return (
        f"no single GPU has {want.cores} cores and {want.blocks} blocks of memory free; "
        f"the nearest has {most['cores']} and {most['blocks']}"
    )


def _take_whole(there: list[FreeOnGpu], want: Want) -> str:
    """Of mode pgpu a GPU has as many `cores` as time slices, and each counts."""
    need, slices = want.whole, want.mode == "pgpu"
    fit = [gpu for gpu in there if gpu["cores"] > 0 and (slices or gpu["idle"])]
    units = sum(gpu["cores"] for gpu in fit) if slices else len(fit)
    if units < need:
        return f"{units} of {need} GPUs free in mode {want.mode}"
    for gpu in fit:
        taken = min(need, gpu["cores"] if slices else 1)
        need -= taken
        gpu.update(cores=gpu["cores"] - taken if slices else 0, blocks=0, idle=False)
        if not need:
            break
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
