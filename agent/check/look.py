"""One finding about a node, and the verdict of all findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# Exit codes, docs/names.md.
GOOD, WRONG, NOT_SEEN = 0, 1, 3


class Grade(Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Look:
    """One thing that was looked at; `text` has the finding and the remedy."""

    subject: str
    grade: Grade
    text: str

    def line(self) -> str:
        return f"{self.grade.value:8} {self.subject:18} {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    code: int


def verdict(looks: Sequence[Look]) -> Verdict:
    """Only a node of which everything was seen can be called good."""
    failed = _named(looks, Grade.FAILED)
    unknown = _named(looks, Grade.UNKNOWN)
    unseen = f"{len(unknown)} could not be looked at: {', '.join(unknown)}"
    if failed:
        text = f"{len(failed)} in the way of offering GPUs: {', '.join(failed)}"
        return Verdict(f"{text}; {unseen}" if unknown else text, WRONG)
    if unknown:
        return Verdict(f"nothing was found in the way of offering GPUs, but {unseen}", NOT_SEEN)
    return Verdict("this node can offer its GPUs", GOOD)


def _named(looks: Sequence[Look], grade: Grade) -> list[str]:
    return list(dict.fromkeys(each.subject for each in looks if each.grade is grade))
