"""The view of the whole cluster."""

from __future__ import annotations

import datetime as dt
from collections import Counter

from agent.kubectl.claims import claimants
from agent.kubectl.fit import lacks
from agent.kubectl.kube import Get, MissingRight
from agent.kubectl.view import (
    STATE,
    UNBOUND,
    UNFINISHED,
    Document,
    asks,
    is_waiting,
    last_events,
    node_view,
    pod_name,
    read,
    visible_pods,
)


def cluster_view(get: Get, namespace: str, names: bool = True) -> Document:
    """All nodes with GPUs, with what is free of them, who holds them, and who waits. Raises KubectlFailed.

    `names` False: holders are not named, which saves the list of all pods, unless a switch waits for some.
    """
    missing: list[str] = []
    nodes: list[Document] | None
    try:
        nodes = get("/api/v1/nodes")["items"]
    except MissingRight as error:
        nodes = None
        missing.insert(0, str(error))
    quiet = not names and nodes is not None and all(applied(node) for node in nodes)
    seen = visible_pods(get, namespace, missing, UNBOUND if quiet else UNFINISHED)
    found = [view for node in nodes or () if (view := node_view(node, seen))]
    sorted_nodes = sorted(found, key=lambda each: str(each["name"]))
    waiters = [pod for pod in seen.pods if is_waiting(pod)]
    waiters += claimants(get, namespace, [pod for pod in seen.pods if pod not in waiters], missing)
    return {
        "at": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "nodesKnown": nodes is not None,
        "nodes": sorted_nodes,
        "bound": [
            {"pod": pod_name(pod), "node": node}
            for pod in seen.pods
            if (node := pod.get("spec", {}).get("nodeName")) and asks(pod)
        ],
        "waiting": [waiting(pod, sorted_nodes) for pod in waiters],
        "events": last_events(get, seen, missing),
        "missing": missing,
    }


def applied(node: Document) -> bool:
    """Whether the node has the mode that it is to have; also where it has no agent."""
    notes = node["metadata"].get("annotations") or {}
    return bool(read(notes.get(STATE)).get("state", "applied") == "applied")


def waiting(pod: Document, nodes: list[Document]) -> Document:
    """A pod that waits, and why: as the scheduler says, else as it follows from the nodes' annotations."""
    conditions = pod.get("status", {}).get("conditions") or []
    scheduled: Document = next((each for each in conditions if each.get("type") == "PodScheduled"), {})
    said = " ".join(str(scheduled.get("message", "")).split())
    return {"pod": pod_name(pod), "reason": said or why(pod, nodes)}


def why(pod: Document, nodes: list[Document]) -> str:
    """The reason that most nodes have; empty where it fits on one, or no node is known."""
    reasons = Counter(lacks(node, pod) for node in nodes)
    if not reasons or "" in reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    return f"{reason} ({count} of {len(nodes)} nodes)"
