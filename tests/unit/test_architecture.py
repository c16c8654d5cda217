"""docs/architecture.md is true: rooms and their order, files of the journeys and what is named in them."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp
import pytest

import agent
from agent.model.modes import Mode

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
JOURNEYS = ("Xid", "label", "Allocate")


# Third-party packages that any room may import; all others are denied by contracts, but to rooms named there.
COMMON = {"anyio", "msgspec", "structlog"}


def contracts() -> list[dict[str, Any]]:
    """The import contracts."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = pyproject["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[set[str]]:
    """Rooms from top to bottom, as import-linter holds them."""
    (found,) = (each["layers"] for each in contracts() if each["id"] == "layers")
    return [set(re.split(r"\s*\|\s*", line)) for line in found if line != "__main__"]


def test_the_picture_of_rooms_is_the_contract() -> None:
    (picture,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    drawn = [set(re.split(r"\s*\|\s*", re.split(r"\s{2,}", line)[0])) for line in picture.splitlines()]
    assert drawn == layers()
    rooms = {path.name for path in (ROOT / "agent").iterdir() if (path / "__init__.py").exists()}
    assert set().union(*drawn) >= rooms - {"_proto"}


def steps(journey: str) -> Iterator[tuple[int, str, str]]:
    """Number, file and what is named in it of each step."""
    (section,) = (
        each for each in PAGE.read_text().split("\n## ")[1:] if re.match(rf"Journey.*{journey}", each)
    )
    yield from (
        (int(number), file, name)
        for number, file, name in re.findall(
            r"^\| (\d+) \| `([\w/.]+)`(?: `(\w+)`)? \|", section, re.MULTILINE
        )
    )


@pytest.mark.parametrize("journey", JOURNEYS)
def test_each_step_of_a_journey_is_in_the_file_that_it_names(journey: str) -> None:
    found = list(steps(journey))
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert len(found) >= 10
    for _, file, name in found:
        tree = ast.parse((ROOT / file).read_text())
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in tree.body if isinstance(node, kinds)}
        assert not name or name in names, f"{file} has no {name}; docs/architecture.md names it"


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_is_a_way_that_imports_know(journey: str) -> None:
    """Each room on the way imports the next or is imported by it, or both meet in the composition root."""
    files = [file for _, file, _ in steps(journey)]
    rooms = list(dict.fromkeys(Path(file).parts[1] for file in files))
    sources = {
        room: "".join(path.read_text() for path in (ROOT / "agent" / room).rglob("*.py"))
        for room in (*rooms, "app")
    }
    for one, other in pairwise(rooms):
        assert any(
            f"agent.{inner}" in sources[outer] for outer, inner in ((one, other), (other, one))
        ) or all(f"agent.{room}" in sources["app"] for room in (one, other)), f"{one} and {other} never meet"


def circles(graph: Any) -> list[list[str]]:
    """Modules that import each other, directly or by others (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            circle = [stack.pop()]
            while circle[-1] != module:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph.modules):
        if module not in order:
            visit(module)
    return found


def test_no_module_imports_itself_by_others() -> None:
    """Inside of rooms, too: each can be drawn without an arrow back. Imports for types alone run nothing."""
    graph = grimp.build_graph("agent", exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 250
    assert circles(graph) == []


def test_no_third_party_package_is_imported_that_no_contract_names() -> None:
    graph = grimp.build_graph("agent", include_external_packages=True, cache_dir=None)
    packages = {module.partition(".")[0] for module in graph.modules} - {"agent", *sys.stdlib_module_names}
    everywhere = ["agent.*"]
    denied = [each["forbidden_modules"] for each in contracts() if each.get("source_modules") == everywhere]
    assert packages <= COMMON | {name for names in denied for name in names}
    assert {"aiohttp", "grpclib", "pynvml"} <= packages


# Rooms whose code is the same for every mode: facts of a mode come from its row, acts from its own modules.
MODELESS = [
    "status",
    "node",
    "telemetry",
    "modes",
    "pairing",
    "inventory",
    "kubelet",
    "cluster",
    "settings",
    "check",
]


@pytest.mark.parametrize("room", MODELESS)
def test_a_room_for_all_modes_names_none(room: str) -> None:
    named = [
        f"{file}:{node.lineno}: Mode.{node.attr}"
        for file in sorted((Path(agent.__file__).parent / room).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Mode"
        if node.attr in Mode.__members__ and node.attr != "OFF"
    ]
    assert named == []


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]


def test_no_public_class_name_twice() -> None:
    """A name means the same in all rooms (docs/style.md); the simulator plays other programs."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "agent").rglob("*.py")):
        if not {"_proto", "simulator"} & set(path.parts):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
    assert len(found) > 300  # they were found
