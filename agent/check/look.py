"""The verdict of all findings about a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent.model.look import Look, Severity

# Exit codes, docs/commands.md.
GOOD, WRONG, NOT_SEEN = 0, 1, 3


@dataclass(frozen=True, slots=True)
class NodeVerdict:
    text: str
    code: int


def verdict(looks: Sequence[Look]) -> NodeVerdict:
    """Only a node of which everything was seen can be called good."""
    failed = _named(looks, Severity.FAILED)
    unknown = _named(looks, Severity.UNKNOWN)
    unseen = f"{len(unknown)} could not be looked at: {', '.join(unknown)}"
    if failed:
        text = f"{len(failed)} in the way of offering GPUs: {', '.join(failed)}"
        return NodeVerdict(f"{text}; {unseen}" if unknown else text, WRONG)
    if unknown:
        return NodeVerdict(f"nothing was found in the way of offering GPUs, but {unseen}", NOT_SEEN)
    return NodeVerdict("this node can offer its GPUs", GOOD)


def _named(looks: Sequence[Look], grade: Severity) -> list[str]:
    return list(dict.fromkeys(each.subject for each in looks if each.grade is grade))
