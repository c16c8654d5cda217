"""One finding about a node, and the verdict of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

# One finding about a node.


class Severity(Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Look:
    """One thing that was looked at; `text` has the finding and the remedy."""

    subject: str
    grade: Severity
    text: str

    @classmethod
    def ok(cls, subject: str, text: str) -> Self:
        return cls(subject, Severity.OK, text)

    @classmethod
    def warning(cls, subject: str, text: str) -> Self:
        return cls(subject, Severity.WARNING, text)

    @classmethod
    def failed(cls, subject: str, text: str) -> Self:
        return cls(subject, Severity.FAILED, text)

    @classmethod
    def unknown(cls, subject: str, text: str) -> Self:
        return cls(subject, Severity.UNKNOWN, text)

    def line(self) -> str:
        return f"{self.grade.value:8} {self.subject:18} {self.text}"


# The verdict of all findings about a node.

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
