"""The cluster's GPUs as far as the rights of the viewer go, as one document of JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from agent.kubectl.kube import Get, KubectlFailed, MissingRight

PREFIX = "gpu-node-agent.io/"
INVENTORY, HOLDERS, STATE, CORDON = (PREFIX + name for name in ("inventory", "holders", "state", "cordon"))
DIGITS = 12  # of the digest of a pod's UID in the annotation of holders
LAST_EVENTS = 20
MOST_WAITERS = 5
OTHER = "other"
CUT = (120, 400, 1024)  # lengths at which the agent cuts sentences
WHOLE = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
PAIRS = {
    "vgpu": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory"),
    "mps": ("nvidia.com/mps-core", "nvidia.com/mps-memory"),
}
RESOURCES = {*WHOLE, *(name for pair in PAIRS.values() for name in pair)}
UNFINISHED = quote("status.phase!=Succeeded,status.phase!=Failed", safe="")
UNBOUND = quote("spec.nodeName=,status.phase=Pending", safe="")
# Whole numbers in the short form of the API server, which keeps an exponent: 1000 as 1k, 1e3 as 1e3.
QUANTITY = re.compile(r"([0-9]{1,18})(?:[eE]\+?([0-9]{1,2})|([kMGTPE]|[KMGTPE]i))?")
FACTORS = {
    **{suffix: 1000**power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": 1024**power for power, suffix in enumerate("KMGTPE", 1)},
}
# namespace/name of a pod in a sentence; domains and paths are none.
POD_NAME = re.compile(r"(?<![\w./-])([a-z0-9](?:[-a-z0-9]*[a-z0-9])?/[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?)")

Document = dict[str, Any]  # a value of JSON


class VisiblePods:
    """Pods that the viewer may read, and the rights that were missing."""

    def __init__(self, pods: list[Document]) -> None:
        self.pods = pods
        self.by_digest = {
            hashlib.sha256(each["metadata"].get("uid", "").encode()).hexdigest()[:DIGITS]: each
            for each in pods
        }
        self.names = {pod_name(each) for each in pods}

    def masked(self, text: str) -> str:
        """A sentence of the agent without names of pods that the viewer may not read."""
        if len(text) in CUT:  # it may end within a namespace, which looks like no name of a pod
            text = text.rpartition(" ")[0] + " ..."
        return POD_NAME.sub(lambda found: found[0] if found[0] in self.names else OTHER, text)


def pod_name(pod: Document) -> str:
    meta = pod["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


def visible_pods(get: Get, namespace: str, missing: list[str], which: str = UNFINISHED) -> VisiblePods:
    """Pods of the cluster, else those of the namespace, else none; what was missing is added to `missing`."""
    for path in ("/api/v1/pods", f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"):
        try:
            return VisiblePods(get(f"{path}?fieldSelector={which}")["items"])
        except MissingRight as error:
            missing.append(str(error))
    return VisiblePods([])


def node_view(node: Document, seen: VisiblePods) -> Document | None:
    """A node with GPUs of this agent; None: it has none."""
    meta = node["metadata"]
    notes = meta.get("annotations") or {}
    inventory, state = read(notes.get(INVENTORY)), read(notes.get(STATE))
    if not inventory:
        return None
    held, cordons = read(notes.get(HOLDERS)), cordons_of(notes.get(CORDON, ""))
    try:
        gpus = [
            gpu_view(each, state.get("gpus", {}), held.get("gpus", {}), cordons, seen)
            for each in sorted(inventory.get("gpus", []), key=lambda gpu: int(gpu["i"]))
        ]
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
        # One node's must not take the view of all others away.
        gpus, state = [], {"message": "its annotations cannot be understood"}
    message, phase = seen.masked(str(state.get("message", ""))), state.get("state", "unknown")
    if waiters := _waiters(gpus, seen, message) if phase in ("switching", "blocked") else "":
        message += f" ({waiters})"
    conditions = {each.get("type"): each for each in node.get("status", {}).get("conditions") or []}
    ready = conditions.get("Ready", {}).get("status", "True") == "True"
    labels = meta.get("labels") or {}
    return {
        "name": meta["name"],
        "model": labels.get("nvidia.com/gpu.product", ""),
        "labels": labels,
        "mode": labels.get(PREFIX + "mode", "none"),
        "desired": state.get("desired", "none"),
        "phase": phase,
        "message": message,
        "nodeReady": ready,
        "unschedulable": bool(node.get("spec", {}).get("unschedulable")),
        # Since when the agent knows of no newer holders; null: they are of now.
        "holdersLost": held.get("lost"),
        "gpus": gpus,
    }


def _waiters(gpus: Iterable[Document], seen: VisiblePods, message: str) -> str:
    """Pods that a switch waits for and that the viewer may read; the agent's message counts all."""
    waits = {name for gpu in gpus if gpu["cordon"] is None for name in gpu["waitingFor"]}
    names = [name for name in waits & seen.names if name not in message]  # agents until 0.2 name them
    more = f" and {len(names) - MOST_WAITERS} more" if len(names) > MOST_WAITERS else ""
    return ", ".join(sorted(names)[:MOST_WAITERS]) + more


def _waiting_for(count: object, holders: Sequence[Document], seen: VisiblePods) -> list[str]:
    """Who holds a GPU that waits for their end; agents until 0.2 name some of them in place of a number."""
    if isinstance(count, list):
        return [seen.masked(each) for each in count]
    return [each["pod"] or f"{each['pods']} {OTHER}" for each in holders] if count else []


def gpu_view(
    gpu: Document, states: Document, held: Document, cordons: Mapping[str, str], seen: VisiblePods
) -> Document:
    index, uuid = int(gpu["i"]), str(gpu["u"])
    state, known = states.get(str(index), {}), held.get(uuid)
    total, holders = (known or {}).get("t", [0, 0, 0]), holders_of((known or {}).get("h", []), seen)
    used = [sum(each["cores"] for each in holders), sum(each["blocks"] for each in holders)]
    wanted = state.get("desired")
    # By live resize containers hold more than their pods asked for, which the kubelet's records do not show.
    left = [total[0] - used[0] - gpu.get("g", 0), total[1] - used[1]]
    if total[2]:
        left[1] = min(total[1], gpu["mem"] // total[2]) - used[1]
    if gpu["m"] == "vgpu" and any(key and cores >= total[0] for key, cores, _ in (known or {}).get("h", [])):
        left = [0, 0]  # a container with all the cores has the GPU to itself
    return {
        "index": index,
        "uuid": uuid,
        "mode": gpu["m"],
        "memoryMiB": gpu["mem"],
        "healthy": not gpu.get("bad"),
        "trouble": gpu.get("bad", ""),
        "offered": gpu["m"] != "off" and not gpu.get("drain") and not gpu.get("bad"),
        "cordon": cordons.get(uuid, cordons.get(str(index))),
        "switchTo": wanted if wanted and wanted != gpu["m"] else None,
        "reason": seen.masked(state.get("reason", "")),
        "waitingFor": _waiting_for(state.get("waitingFor", 0), holders, seen),
        "known": known is not None,  # whether the agent says who holds what; earlier ones do not
        "blockMiB": total[2],
        "total": total[:2],
        "used": used,
        "free": [max(0, each) for each in left],
        # Further MPS clients, at most: a pod may be more than one; null: without a ceiling.
        "clients": max(0, gpu["c"] - sum(each["pods"] for each in holders)) if gpu.get("c") else None,
        "holders": holders,
    }


def holders_of(entries: Iterable[Any], seen: VisiblePods) -> list[Document]:
    """Holders by name where the viewer may read the pod; all others together."""
    found: list[Document] = []
    others: Document = {"pod": None, "cores": 0, "blocks": 0, "pods": 0}
    for key, cores, blocks in entries:
        pod = seen.by_digest.get(key)
        entry: Document = {"pod": pod_name(pod), "cores": 0, "blocks": 0, "pods": 0} if pod else others
        entry.update(cores=entry["cores"] + cores, blocks=entry["blocks"] + blocks, pods=entry["pods"] + 1)
        if pod:
            found.append(entry)
    return [*found, others] if others["pods"] else found


def cordons_of(text: str) -> dict[str, str]:
    """Reason by GPU, index or UUID, as the annotation names it."""
    if text.lstrip().startswith("{"):
        document = read(text)
        return {
            key: str(value.get("reason", "")) for key, value in document.items() if isinstance(value, dict)
        }
    parts = (part.partition("=") for part in text.split(",") if part.strip())
    return {gpu.strip(): reason.strip() for gpu, _, reason in parts}


def read(text: str | None) -> Document:
    """An annotation's object; empty where there is none, or none that can be understood."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def limits_of(container: Document) -> dict[str, int]:
    """The agent's resources that a container asks for."""
    limits = container.get("resources", {}).get("limits") or {}
    found = {name: QUANTITY.fullmatch(str(limits.get(name, ""))) for name in RESOURCES}
    return {
        name: int(each[1]) * 10 ** int(each[2] or 0) * FACTORS.get(each[3], 1)
        for name, each in found.items()
        if each
    }


def asks(pod: Document) -> bool:
    spec = pod.get("spec", {})
    return any(limits_of(each) for part in ("containers", "initContainers") for each in spec.get(part) or [])


def is_waiting(pod: Document) -> bool:
    status = pod.get("status", {})
    return not pod.get("spec", {}).get("nodeName") and status.get("phase") == "Pending" and asks(pod)


def last_events(get: Get, seen: VisiblePods, missing: list[str]) -> list[Document]:
    """The newest events of the agents on nodes."""
    selector = quote("involvedObject.kind=Node,source=gpu-node-agent", safe="")
    try:
        items = get(f"/api/v1/namespaces/default/events?fieldSelector={selector}")["items"]
    except MissingRight as error:
        missing.append(str(error))
        return []
    except KubectlFailed as error:
        missing.append(f"events cannot be read: {error}")
        return []
    items = [each for each in items if each["involvedObject"].get("kind") == "Node"]
    items.sort(key=lambda each: str(each.get("lastTimestamp") or ""), reverse=True)
    return [
        {
            "at": each.get("lastTimestamp"),
            "node": each["involvedObject"]["name"],
            "reason": each.get("reason", ""),
            "message": seen.masked(each.get("message", "")),
            "warning": each.get("type") == "Warning",
        }
        for each in items[:LAST_EVENTS]
    ]
