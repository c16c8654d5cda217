"""Those who patch the own Node object, and what is to be said where that fails."""

from collections.abc import Iterator, Mapping

from agent.node.capacity import Capacity
from agent.node.conditions import NodeStateWriter
from agent.node.taint import SchedulingTaint
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series

PATCHED = {"status": "node.status", "taint": "the node's taint", "report": "the Node object"}

# By the part that they patch.
Writers = Mapping[str, Capacity | SchedulingTaint | NodeStateWriter]


def remarks(writers: Writers) -> list[str]:
    """An API server that can be read, but not be written to."""
    return [
        f"{PATCHED[name]} cannot be patched: {writer.problem}"
        for name, writer in writers.items()
        if writer.problem
    ]


def metrics(writers: Writers) -> Iterator[Series]:
    """How often each part was patched, and how often that failed."""
    for name, writer in writers.items():
        yield d.NODE_PATCHES, writer.patches, (name, "ok")
        yield d.NODE_PATCHES, writer.failures, (name, "failed")
