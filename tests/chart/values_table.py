"""The table of the chart's values in docs/install.md, from the comments of values.yaml.

`python -m tests.chart.values_table` writes it again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "charts" / "gpu-node-agent" / "values.yaml"
DOCUMENT = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- values: made from values.yaml by `make docs` -->", "<!-- end of values -->"
LONGEST_DEFAULT = 60
# Blocks of Kubernetes' own.
OPAQUE = ("affinity", "resources")


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Key path, default and meaning of each value; the first of a block has the block's comment if none."""
    lines = text.splitlines()
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    yield from _rows(root, "", "", lines)


def _rows(node: yaml.MappingNode, path: str, above: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else str(key.value)
        meaning = _comment(lines, key.start_mark.line, key.start_mark.column) or above
        above = ""
        # What is written on one line, or is a list, is one value.
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        if block and key.value not in OPAQUE:
            yield from _rows(value, name, meaning, lines)
        else:
            yield name, _default(value), meaning


def _default(node: yaml.Node) -> str:
    value = yaml.safe_load(yaml.serialize(node))
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see `values.yaml`"


def _comment(lines: list[str], line: int, column: int) -> str:
    found: list[str] = []
    while line > 0 and lines[line - 1].startswith(" " * column + "#"):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(found).replace("|", "\\|")


def table(text: str) -> str:
    """The table, with its markers."""
    body = "".join(f"| `{name}` | {default} | {meaning} |\n" for name, default, meaning in rows(text))
    return f"{BEGIN}\n\n| value | by default | meaning |\n| --- | --- | --- |\n{body}\n{END}"


def updated(document: str, values: str) -> str:
    """The document with the table as the values have it now."""
    head, begun, rest = document.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{DOCUMENT.name} has no table between {BEGIN} and {END}")
    return f"{head}{table(values)}{tail}"


def main() -> None:
    """Rewrite the document."""
    DOCUMENT.write_text(updated(DOCUMENT.read_text(), VALUES.read_text()))


if __name__ == "__main__":
    main()
