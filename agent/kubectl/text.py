"""The views as text for a terminal."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Sequence

from agent.kubectl.claims import DRA, free_devices
from agent.kubectl.fit import NeverFits, fragments, lacks, wants_of
from agent.kubectl.view import OTHER, PAIRS, Document, pod_name

MOST_NODES = 3  # that are named for each reason
BAR = 20


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def overview(view: Document) -> list[str]:
    """One line for each node, then who waits, then what could not be seen."""
    if view["nodes"]:
        rows = [("NODE", "GPUS", "MODE", "HEALTH", "FREE", "LARGEST", "IN FRAGMENTS", "SWITCH")]
        lines = list(table([*rows, *(_node_row(node) for node in view["nodes"])]))
    elif view["nodesKnown"]:
        lines = ["no node offers GPUs by this agent"]
    else:
        bound = [(each["pod"], each["node"]) for each in view["bound"]]
        lines = list(table([("YOUR POD", "NODE"), *bound])) if bound else ["no pod of yours has GPUs"]
    lines += [
        f"{node['name']}: free shares as last known, {age(node['holdersLost'], view['at'])} old"
        for node in view["nodes"]
        if node["holdersLost"]
    ]
    if view["waiting"]:
        waiting = [("WAITING POD", "WHY"), *((each["pod"], each["reason"]) for each in view["waiting"])]
        lines += ["", *table(waiting)]
    return lines + missing_rights(view)


def _node_row(node: Document) -> tuple[str, ...]:
    gpus, pieces = node["gpus"], fragments(node)
    modes = Counter(str(gpu["mode"]) for gpu in gpus)
    mode = next(iter(modes)) if len(modes) == 1 else ", ".join(f"{n} {m}" for m, n in sorted(modes.items()))
    bad = sum(not gpu["healthy"] for gpu in gpus)
    cordoned = sum(gpu["cordon"] is not None for gpu in gpus)
    health = [f"{bad} unhealthy"] * (bad > 0) + [f"{cordoned} cordoned"] * (cordoned > 0)
    known = all(gpu["known"] for gpu in gpus)
    free = [f"{pieces['freeGpus']} GPUs"] if any(gpu["mode"] == "pgpu" for gpu in gpus) else []
    free += [f"{free_devices(node)[0]} devices"] if any(gpu["mode"] == DRA for gpu in gpus) else []
    shared = any(gpu["mode"] in PAIRS for gpu in gpus)
    free += [f"{pieces['freeCores']} %"] if shared else []
    switching = node["phase"] != "applied"
    return (
        str(node["name"]),
        str(len(gpus)),
        mode,
        ", ".join(health) or "healthy",
        (" + ".join(free) or "-") if known else "?",
        f"{pieces['largest']} %" if shared and known else "-",
        f"{pieces['inFragments']} %" if shared and known else "-",
        f"{node['desired']}: {node['phase']}, {node['message']}".rstrip(", ") if switching else "-",
    )


def missing_rights(view: Document) -> list[str]:
    return ["", *view["missing"]] if view["missing"] else []


def age(since: str, now: str) -> str:
    """The time between two moments in RFC 3339."""
    try:
        span = dt.datetime.fromisoformat(now) - dt.datetime.fromisoformat(since)
    except ValueError:
        return "?"
    seconds = max(0, round(span.total_seconds()))
    return (
        f"{seconds} s"
        if seconds < 120
        else f"{seconds // 60} min"
        if seconds < 7200
        else f"{seconds // 3600} h"
    )


def top(view: Document, rows: int = 0) -> list[str]:
    """Each GPU: how much of it is allocated, and to whom; the fullest first where lines are few."""
    found = [("NODE", "GPU", "MODE", "CORES", "", "MEMORY", "HELD BY")]
    gpus = [(node, gpu) for node in view["nodes"] for gpu in node["gpus"]]
    if rows:
        gpus.sort(key=lambda pair: -_share(pair[1]))
    missing = missing_rights(view)
    shown = gpus[: max(1, rows - 2 - len(missing))] if rows else gpus  # less the head, and who is left out
    for node, gpu in shown:
        share = _share(gpu)
        memory = (
            f"{gpu['used'][1] * gpu['blockMiB'] / 1024:.0f} / {gpu['memoryMiB'] / 1024:.0f} GiB"
            if gpu["blockMiB"]
            else f"{gpu['memoryMiB'] / 1024:.0f} GiB"
        )
        filled = round(share * BAR)
        bar = "[" + "|" * filled + " " * (BAR - filled) + "]" if gpu["known"] else "?"
        found.append(
            (
                node["name"],
                str(gpu["index"]),
                _mode(gpu),
                f"{share * 100:.0f} %" if gpu["known"] else "?",
                bar,
                memory,
                _holders(gpu),
            )
        )
    lines = list(table(found))
    if len(shown) < len(gpus):
        lines.append(f"... {len(gpus) - len(shown)} more GPUs: --once or -o json shows them")
    return lines + missing


def _share(gpu: Document) -> float:
    return float(min(1.0, gpu["used"][0] / gpu["total"][0])) if gpu["total"][0] else 0.0


def _mode(gpu: Document) -> str:
    if gpu["cordon"] is not None:
        return f"{gpu['mode']} (cordoned)"
    if not gpu["healthy"]:
        return f"{gpu['mode']} (unhealthy)"
    return f"{gpu['mode']} -> {gpu['switchTo']}" if gpu["switchTo"] else str(gpu["mode"])


def _holders(gpu: Document) -> str:
    return ", ".join(each["pod"] or f"{each['pods']} {OTHER}" for each in gpu["holders"]) or (
        "-" if gpu["known"] else "?"
    )


def explained_waiting(pod: Document, view: Document) -> list[str]:
    """A pod that waits: what each node lacks, by the nodes' annotations."""
    try:
        wants = wants_of(pod)
    except NeverFits as error:
        return [f"pod {pod_name(pod)} waits for ever: {error}"]
    lines = [f"pod {pod_name(pod)} asks for {' + '.join(want.words() for want in wants)}"]
    reasons: dict[str, list[str]] = {}
    for node in view["nodes"]:
        reasons.setdefault(lacks(node, pod), []).append(node["name"])
    fitting = reasons.pop("", [])
    if fitting:
        lines.append(f"its GPUs are free on {_named(fitting)}; see its events for other reasons")
    elif not view["nodes"]:
        lines.append("no node offers GPUs by this agent")
    else:
        lines.append(f"it fits on none of {len(view['nodes'])} nodes:")
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(names)} x {reason} ({_named(names)})")
    return lines


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NODES} more" if len(names) > MOST_NODES else ""
    return f"{', '.join(names[:MOST_NODES])}{more}"


def explained_running(pod: Document, node: Document | None) -> list[str]:
    """A pod that is bound: which GPU, which limits, who else is there."""
    name, where = pod_name(pod), pod["spec"]["nodeName"]
    lines = [f"pod {name} is bound to node {where}"]
    if node is None:
        return [*lines, f"node {where} has no agent that says more"]
    mine = [(gpu, each) for gpu in node["gpus"] for each in gpu["holders"] if each["pod"] == name]
    if not mine:
        lines.append("it holds no GPU by the agent's newest record")
    for gpu, held in mine:
        whole = gpu["mode"] == "pgpu" or (gpu["mode"] == DRA and not gpu["blockMiB"])
        what = "a whole GPU" if whole else _amount(gpu, held)
        trouble = f"; the GPU is not healthy: {gpu['trouble']}" if not gpu["healthy"] else ""
        lines.append(f"  GPU {gpu['index']} ({gpu['uuid']}), mode {gpu['mode']}: {what}{trouble}")
        others = [
            f"{each['pod'] or str(each['pods']) + ' ' + OTHER} ({_amount(gpu, each)})"
            for each in gpu["holders"]
            if each is not held
        ]
        if others:
            lines.append(f"    beside it: {', '.join(others)}")
    notes = pod["metadata"].get("annotations") or {}
    asked = (
        (key, notes.get(f"gpu-node-agent.io/{key}")) for key in ("limits", "resize", "burst", "priority")
    )
    lines += [f"  {key}: {text}" for key, text in asked if text]
    if node["holdersLost"]:
        lines.append(
            f"  as last known: the node's agent has not read newer records since {node['holdersLost']}"
        )
    return lines


def _amount(gpu: Document, held: Document) -> str:
    memory = f" and {held['blocks'] * gpu['blockMiB'] / 1024:g} GiB" if gpu["blockMiB"] else ""
    return f"{held['cores']} %{memory}" if memory else f"{held['cores']} of {gpu['total'][0]}"


def explained_end(pod: Document) -> list[str]:
    """A pod that is over; one that was refused at admission gets the kubelet's words."""
    status = pod.get("status", {})
    said = f"{status.get('reason', '')}: {' '.join(str(status.get('message', '')).split())}".strip(": ")
    lines = [f"pod {pod_name(pod)} has ended: {status.get('phase')}{', ' + said if said else ''}"]
    if owners := pod["metadata"].get("ownerReferences"):
        return [*lines, f"its {owners[0]['kind']} {owners[0]['name']} creates another one"]
    return [*lines, "delete it and create it again"]
