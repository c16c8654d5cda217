"""Data classes whose methods are compiled when first called, without signatures: all else as ever."""

import subprocess
import sys
from pathlib import Path

# By an interpreter of its own: what is changed is changed for all classes that come later.
SCRIPT = """
import agent.kit.lean_dataclasses
import copy, dataclasses, pickle, sys, typing

@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    seen: list[int] = dataclasses.field(default_factory=list, compare=False, repr=False)

@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Named(Point):
    name: str = dataclasses.field(default="", kw_only=True)
    def __post_init__(self) -> None:
        assert self.x >= 0

class Derived(Named):
    def __init__(self) -> None:
        super().__init__(7, name="derived")

def raised(act: typing.Callable[[], object]) -> str:
    try:
        return repr(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

late = vars(Point)["__eq__"].__code__ is vars(Point)["__init__"].__code__
compiled = lambda: vars(Point)["__eq__"].__code__ is not vars(Named)["__eq__"].__code__
assert late or sys.version_info >= (3, 13)
for _ in range(2):
    assert Point(1) == Point(1, 2, [3]) != Point(2)
    assert Point(1) != 1 and Named(1) != Point(1) and hash(Point(1)) == hash(Point(1)) == hash((1, 2))
    assert Named(1, name="a") < Named(1, name="b") and not Named(2) <= Named(1)
    assert repr(Named(1)) == "Named(x=1, y=2, name='')"
    assert str(Derived()) == "Derived(x=7, y=2, name='derived')"
    assert dataclasses.replace(Named(1), y=5, name="n") == Named(1, 5, name="n")
    assert copy.deepcopy(Point(1)) == pickle.loads(pickle.dumps(Point(1))) == Point(1)
    print(raised(lambda: setattr(Point(1), "x", 2)))
    print(raised(lambda: delattr(Named(1), "x")))
    print(raised(lambda: setattr(Point(1), "z", 2)))
    print(raised(lambda: Point()))
    print(raised(lambda: Named(-1)))
    print(raised(lambda: Named(1) < 1))
    print(Point(1).seen is Point(1).seen, Point.__init__.__qualname__, Point.__match_args__)
assert compiled()
"""
CLASS = """
import agent.kit.lean_dataclasses
import dataclasses
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
print(Point.__doc__)
"""
WITHOUT = "import agent.kit.lean_dataclasses"


def run(script: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    return done.stdout


def test_methods_compiled_late_are_those_of_python() -> None:
    usual = SCRIPT.replace(WITHOUT, "").replace("assert late or", "assert True or")
    assert run(SCRIPT) == run(usual)


def test_methods_are_compiled_once() -> None:
    count = """
import dataclasses
made = []
of_python = dataclasses._create_fn
dataclasses._create_fn = lambda name, *a, **k: made.append(name) or of_python(name, *a, **k)
import agent.kit.lean_dataclasses
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
print(made)
for _ in range(3):
    Point(1) == Point(2)
print(sorted(made), "__init__" in Point.__init__.__code__.co_name)
"""
    if sys.version_info < (3, 13):  # later ones compile a class at once
        assert run(count).splitlines() == ["[]", "['__eq__', '__init__'] True"]


def test_classes_come_without_the_text_of_their_signatures() -> None:
    assert run(CLASS, "-OO").strip() == "Point"
