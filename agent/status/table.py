"""The status report for a person at a terminal: problems first, with their remedies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.modes.switch_state import Phase

GIB = 1 << 30
_RED, _YELLOW, _GREEN, _DIM, _OFF = "\033[31m", "\033[33m", "\033[32m", "\033[2m", "\033[0m"
_COLOURS = {"healthy": _GREEN, "suspect": _YELLOW, "unhealthy": _RED, "probation": _YELLOW}

Document = Mapping[str, Any]


def render(document: Document, colours: bool = False) -> str:
    """The whole report as text, without a line feed at its end."""
    return "\n".join(_lines(document, colours))


def _lines(document: Document, colours: bool) -> Iterator[str]:
    yield _headline(document)
    for sentence in (*document["blockers"], *document["problems"]):
        yield f"! {sentence}"
    mode = document["mode"]
    if mode["phase"] == Phase.SWITCHING.value:
        yield f"mode {mode['desired']} is not in force everywhere yet: {mode['message']}"
    yield ""
    rows = [_row(gpu) for gpu in document["gpus"]]
    head = ("GPU", "UUID", "MODEL", "MEMORY", "NUMA", "MODE", "HEALTH", "HELD BY")
    yield from _table([head, *rows], [None, *(gpu["health"]["state"] for gpu in document["gpus"])], colours)
    if not rows:
        yield "no GPU is known"
    for one in document["unreadable"]:
        yield f"at index {one['index']} stands a GPU that cannot be read: {one['cause']}"
    notes = [line for gpu in document["gpus"] for line in _notes(gpu)] + _mode_notes(document["gpus"])
    if notes:
        yield ""
        yield from notes


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


def _row(gpu: Document) -> tuple[str, ...]:
    numa = "-" if gpu["numaNode"] is None else str(gpu["numaNode"])
    memory = f"{gpu['memoryBytes'] / GIB:.0f} GiB" if gpu["memoryBytes"] else "-"
    return (
        str(gpu["index"]),
        gpu["uuid"],
        gpu["model"],
        memory,
        numa,
        _mode(gpu["mode"]),
        _health(gpu["health"]),
        ", ".join(_holder(holder) for holder in gpu["holders"]) or "-",
    )


def _mode(mode: Document) -> str:
    active = str(mode["active"])
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


def _holder(holder: Document) -> str:
    units = " + ".join(
        f"{count} {resource.rpartition('/')[2]}" for resource, count in holder["units"].items()
    )
    return f"{holder['pod']} ({units})"


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


def _table(rows: Sequence[Sequence[str]], states: Sequence[str | None], colours: bool) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row, state in zip(rows, states, strict=True):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        if colours:
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


def parse_duration(text: str) -> float:
    """`90s`, `10m`, `2h` or plain seconds, in seconds. Raises ValueError."""
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    number = text[:-1] if factor else text
    if not number.replace(".", "", 1).isdigit():
        raise ValueError(f"{text!r} is no duration: write 90s, 10m or 2h")
    return float(number) * (factor or 1)
