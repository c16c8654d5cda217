"""The status report for a person at a terminal: problems first, with their remedies."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent.modes.planner import Phase

GIB = 1 << 30
SHORT_UUID = 12  # characters: GPU- and the first group; -o wide has all of it
_RED, _YELLOW, _GREEN, _DIM, _OFF = "\033[31m", "\033[33m", "\033[32m", "\033[2m", "\033[0m"
_COLOURS = {"healthy": _GREEN, "suspect": _YELLOW, "unhealthy": _RED, "probation": _YELLOW}

Document = Mapping[str, Any]


def render(document: Document, colours: bool = False, columns: int | None = 100) -> str:
    """The whole report as text, without a line feed at its end. `columns` None: as wide as it is."""
    return "\n".join(_lines(document, colours, columns))


def _lines(document: Document, colours: bool, columns: int | None) -> Iterator[str]:
    def broken(lines: Iterable[str], indent: int) -> Iterator[str]:
        for line in lines:
            yield from _broken(line, columns, indent)

    yield from _broken(_headline(document), columns, 2)
    yield from broken((f"! {text}" for text in (*document["blockers"], *document["problems"])), 2)
    mode = document["mode"]
    if mode["phase"] == Phase.SWITCHING.value:
        yield from broken([f"mode {mode['desired']} is not in force everywhere yet: {mode['message']}"], 2)
    yield ""
    gpus = document["gpus"]
    wide = columns is None
    rows = [_row(gpu, wide) for gpu in gpus]
    head = ("GPU", "UUID", "MODEL", "MEMORY", "NUMA", "MODE", "HEALTH", *(("PCI",) if wide else ()))
    states = [None, *(gpu["health"]["state"] for gpu in gpus)] if colours else None
    yield from table(_cut([head, *rows], 2, None if wide else columns), states)
    if not rows:
        yield "no GPU is known"
    yield from broken(
        (
            f"at index {one['index']} stands a GPU that cannot be read: {one['cause']}"
            for one in document["unreadable"]
        ),
        2,
    )
    yield from broken(_held(document), 5)
    notes = [line for gpu in gpus for line in _notes(gpu)] + _mode_notes(gpus)
    if notes:
        yield ""
        yield from broken(notes, 7)


def _broken(line: str, columns: int | None, indent: int) -> list[str]:
    if columns is None or len(line) <= columns:
        return [line]
    left = len(line) - len(line.lstrip(" "))
    return textwrap.wrap(
        line,
        columns,
        initial_indent=" " * left,
        subsequent_indent=" " * max(left, indent),
        drop_whitespace=True,
        break_on_hyphens=False,
    )


def _cut(rows: Sequence[Sequence[str]], column: int, columns: int | None) -> Sequence[Sequence[str]]:
    """The rows with one column cut where they would be too long together."""
    if columns is None:
        return rows
    widths = [max(map(len, each)) for each in zip(*rows, strict=True)]
    room = max(8, columns - (sum(widths) + 2 * (len(widths) - 1) - widths[column]))
    if widths[column] <= room:
        return rows
    return [
        (
            *row[:column],
            row[column] if len(row[column]) <= room else f"{row[column][: room - 1]}~",
            *row[column + 1 :],
        )
        for row in rows
    ]


def _held(document: Document) -> Iterator[str]:
    """Who holds what, one line for each container and GPU."""
    age = document.get("holdersAgeSeconds")
    found = [
        (str(gpu["index"]), holder["pod"], holder["container"], _units(holder["units"]))
        for gpu in document["gpus"]
        for holder in gpu["holders"]
    ]
    if not found:
        return
    yield ""
    if age is not None:
        yield f"holders as last known, {duration(age)} ago"
    yield from table([("GPU", "HELD BY", "CONTAINER", "UNITS"), *found])


def _headline(document: Document) -> str:
    mode = document["mode"]
    parts = [f"gpu-node-agent {document['version']}", "ready" if document["ready"] else "NOT READY"]
    if document["driver"]:
        parts.append(f"driver {document['driver']}, CUDA {document['cuda']}")
    parts.append(f"mode {mode['desired']} ({mode['phase']})")
    parts.append(f"GPUs handed over by {document['injection']['way']}")
    if document["releasedForSeconds"] is not None:
        parts.append(f"RELEASED for {duration(document['releasedForSeconds'])} more")
    return " | ".join(parts)


def _row(gpu: Document, wide: bool) -> tuple[str, ...]:
    numa = "-" if gpu["numaNode"] is None else str(gpu["numaNode"])
    memory = f"{gpu['memoryBytes'] / GIB:.0f} GiB" if gpu["memoryBytes"] else "-"
    return (
        str(gpu["index"]),
        gpu["uuid"] if wide else gpu["uuid"][:SHORT_UUID],
        gpu["model"],
        memory,
        numa,
        _mode(gpu),
        _health(gpu["health"]),
        *((gpu.get("pciBusId") or "-",) if wide else ()),
    )


def _mode(gpu: Document) -> str:
    mode = gpu["mode"]
    active = str(mode["active"])
    if mode.get("door") == "dra":
        active = active if active == "dra" else f"dra: {active}"
    if gpu.get("cordon"):
        return f"{active} (cordoned)"
    if mode["wanted"] != mode["active"]:
        return f"{active} -> {mode['wanted']}"
    return active if mode["selling"] or active == "off" else f"{active} (draining)"


def _health(health: Document) -> str:
    state = str(health["state"])
    if state == "probation" and health["probationLeftSeconds"] is not None:
        return f"probation, {duration(health['probationLeftSeconds'])} left"
    if health["forSeconds"] is not None:
        return f"{state} for {duration(health['forSeconds'])}"
    return state if health["served"] else f"{state}, not served"


def _units(units: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {resource.rpartition('/')[2]}" for resource, count in units.items())


def _notes(gpu: Document) -> Iterator[str]:
    health, mode = gpu["health"], gpu["mode"]
    name = f"GPU {gpu['index']}"
    if health["state"] != "healthy":
        yield f"{name}: {health['cause']}"
        if health["obstacle"] and health["obstacle"] != health["cause"]:
            yield f"{' ' * len(name)}  {health['obstacle']}"
        if health["remedy"]:
            yield f"{' ' * len(name)}  what to do: {health['remedy']}"
    if mode["waitingFor"]:
        yield f"{name}: waits for {', '.join(mode['waitingFor'])}"
    yield from (f"{name}: {line}" for line in _mps_notes(gpu.get("mps")))


def _mps_notes(mps: Document | None) -> Iterator[str]:
    """Problems of a GPU's MPS daemon and of its clients."""
    if mps is None:
        return
    if mps["state"] != "serving":
        yield f"its MPS daemon is {mps['state']}: {mps['reason']}"
    for pod in mps["podsWithoutClient"]:
        yield f"pod {pod} holds MPS shares and has no client: it may run without MPS, or not use the GPU"
    for pod in mps["podsWithManyClients"]:
        yield f"pod {pod} has several MPS clients, and each of them may use the pod's whole share"
    for pod in mps["podsAboveCap"]:
        yield f"pod {pod} uses more memory than its share: its processes have a cap each, not one together"
    if apart := mps["podsOfOtherUsers"]:
        yield (
            f"pods {', '.join(apart)} run as different users and wait for each other: this driver's MPS "
            "serves one user at a time"
        )
    for pod in mps["rootPods"]:
        yield f"pod {pod} runs as root and reaches the MPS control socket"


def _mode_notes(gpus: Sequence[Document]) -> list[str]:
    """Why GPUs are not offered; those with one reason in one line."""
    indices: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu["mode"]["reason"]:
            indices.setdefault(gpu["mode"]["reason"], []).append(str(gpu["index"]))
    notes = [f"GPU {', '.join(found)}: not offered: {reason}" for reason, found in indices.items()]
    trusted = [str(gpu["index"]) for gpu in gpus if gpu["mode"].get("enforced") == "no"]
    if trusted:
        notes.append(
            f"GPU {', '.join(trusted)}: enforced: no: shares are promised, processes are not kept to them"
        )
    memory = [str(gpu["index"]) for gpu in gpus if gpu["mode"].get("enforced") == "memory"]
    if memory:
        notes.append(f"GPU {', '.join(memory)}: enforced: memory: compute is not enforced")
    return notes


def table(rows: Sequence[Sequence[str]], states: Sequence[str | None] | None = None) -> Iterator[str]:
    """Rows in columns; `states`: of each row, by which its health is coloured."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, state in zip(rows, states or [None] * len(rows), strict=True):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        if states:
            cells[6] = f"{_COLOURS.get(state or '', _DIM)}{cells[6]}{_OFF}"
        yield "  ".join(cells).rstrip()


def duration(seconds: float) -> str:
    """Seconds as a person says it: 42 s, 9 min, 3 h 5 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
