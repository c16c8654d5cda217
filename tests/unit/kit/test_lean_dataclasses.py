"""As in the image, without docstrings: no class gets the text of its signature, and all else is as ever."""

import subprocess
import sys

SCRIPT = """
import agent.kit.lean_dataclasses
import dataclasses, inspect
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
print(Point.__doc__, Point(1), inspect.signature(Point))
"""


def test_classes_come_without_the_text_of_their_signatures() -> None:
    command = [sys.executable, "-OO", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Point Point(x=1, y=2) (x: int, y: int = 2) -> None"
