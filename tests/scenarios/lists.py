"""Every list message that the agent sent, and the rule they are held to: no GPU in two modes at once."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.model.modes import MODE_OF_UNIT, REPLICA, parse
from tests.component.protos import load
from tests.recording_agent import ENDED, HEADER, OPENED, SENDING, SENT, START

# How a GPU is offered, by the kind of its device IDs. Whole and sliced are two: both at once are twice.
WAYS = {unit: mode.value for unit, mode in MODE_OF_UNIT.items()} | {REPLICA: "slices"}
Ways = Mapping[str, frozenset[str]]  # GPU -> ways in which a list has IDs of it
NOTHING: Ways = {}


@dataclass
class Checked:
    """The contents of the record."""

    messages: int = 0
    lives: int = 0
    streams: int = 0
    faults: list[str] = field(default_factory=list)


def check(path: Path) -> Checked:
    """Read a record. From the moment a message leaves until it has left, both lists count. Blocks."""
    found = Checked()
    sure: dict[str, Ways] = {}  # what the kubelet has for certain, by resource
    coming: dict[str, Ways] = {}  # what it may have got
    for what, resource, message in records(path):
        if what == START:
            found.lives += 1
            sure.clear()  # streams of an agent that was killed ended with it
            coming.clear()
        elif what == OPENED:
            found.streams += 1
        elif what == SENDING:
            found.messages += 1
            coming[resource] = ways_of(message)
            found.faults.extend(_twice(found.messages, sure, coming))
        elif what == SENT:
            sure[resource] = coming.pop(resource, NOTHING)
        elif what == ENDED:
            sure.pop(resource, None)
            coming.pop(resource, None)
    return found


def flickers(path: Path, resource: str, gpus: Collection[str]) -> list[str]:
    """List messages on which one of those GPUs is missing or not healthy. Blocks."""
    found: list[str] = []
    for number, (what, name, message) in enumerate(records(path)):
        if what == SENDING and name == resource:
            devices = load("deviceplugin").ListAndWatchResponse.FromString(message).devices
            healthy = {parse(device.ID).gpu for device in devices if device.health == "Healthy"}
            found += [f"message {number}: {gpu} is not offered" for gpu in gpus if gpu not in healthy]
    return found


def records(path: Path) -> Iterator[tuple[bytes, str, bytes]]:
    """(what, resource, message) in the order of writing."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        what, name, length = HEADER.unpack_from(data, at)
        at += HEADER.size
        yield what, data[at : at + name].decode(), data[at + name : at + name + length]
        at += name + length


def ways_of(message: bytes) -> Ways:
    """In which ways a list message has IDs of which GPU, well or not."""
    ways: dict[str, set[str]] = {}
    for device in load("deviceplugin").ListAndWatchResponse.FromString(message).devices:
        found = parse(device.ID)
        ways.setdefault(found.gpu, set()).add(WAYS[found.unit])
    return {gpu: frozenset(each) for gpu, each in ways.items()}


def _twice(number: int, *states: Mapping[str, Ways]) -> Iterator[str]:
    ways: dict[str, set[str]] = {}
    for lists in states:
        for per_gpu in lists.values():
            for gpu, each in per_gpu.items():
                ways.setdefault(gpu, set()).update(each)
    for gpu, all_ways in ways.items():
        if len(all_ways) > 1:
            yield f"message {number}: {gpu} is listed as {' and '.join(sorted(all_ways))}"
