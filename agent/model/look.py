"""One finding about a node."""

from dataclasses import dataclass
from enum import Enum


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
