"""One finding about a node."""

from dataclasses import dataclass
from enum import Enum
from typing import Self


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
