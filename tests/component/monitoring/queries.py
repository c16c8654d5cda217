"""Every query that the project ships, read from its files, and brought to a test's pace."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts" / "gpu-node-agent" / "files"
RULES = sorted((FILES / "rules").glob("*.yaml"))
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))
DOCUMENT = ROOT / "docs" / "monitoring.md"
WINDOW = "4s"
_DURATION = r"\d+(?:ms|[smhdwy])"


def quickened(expression: str) -> str:
    """The same query over seconds instead of minutes and days."""
    found = re.sub(rf"\[{_DURATION}:{_DURATION}\]", f"[{WINDOW}:1s]", expression)
    found = re.sub(rf"\[(?:{_DURATION}|\$__rate_interval)\]", f"[{WINDOW}]", found)
    return re.sub(rf"offset {_DURATION}", "offset 4s", found)


def panels() -> Iterator[tuple[str, str]]:
    """Title and query of every target of every panel, with all variables at `All`."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        names = {each["name"] for each in board["templating"]["list"]}
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name in names:
                    expression = expression.replace(f"${name}", ".*")
                yield f"{board['title']}: {panel['title']}", quickened(expression)


def variables() -> Iterator[tuple[str, str]]:
    """Name of each query variable, and the series that it takes label values of."""
    for path in DASHBOARDS:
        for each in json.loads(path.read_text())["templating"]["list"]:
            if each["type"] == "query":
                found = re.fullmatch(r"label_values\((.*), (\w+)\)", each["query"]["query"])
                assert found, f"{path.name}: {each['name']} is no label_values query"
                series = re.sub(r"\$\w+", ".*", found[1])
                yield (
                    each["name"],
                    f'{series.removesuffix("}")}{"," if "{" in series else "{"} {found[2]}!=""}}',
                )


def documented() -> list[str]:
    """Every query of docs/monitoring.md."""
    blocks: list[str] = re.findall(r"^```promql\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [quickened(block.strip()) for block in blocks]


def rules(*without: str) -> dict[str, str]:
    """The rule files at a test's pace, by name, but for those: an alert waits a second at most."""
    found = {}
    for path in (each for each in RULES if each.stem not in without):
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            group.pop("interval", None)
            for rule in group["rules"]:
                rule["expr"] = quickened(rule["expr"])
                if "for" in rule:
                    rule["for"] = "1s"
        found[path.name] = yaml.safe_dump(document)
    return found


def named(kind: str, *without: str) -> list[str]:
    """Names of all rules of a kind, record or alert, but for those of some files."""
    documents: list[Any] = [yaml.safe_load(path.read_text()) for path in RULES if path.stem not in without]
    return [
        rule[kind]
        for document in documents
        for group in document["groups"]
        for rule in group["rules"]
        if kind in rule
    ]
