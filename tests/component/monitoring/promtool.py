"""promtool of the real Prometheus, and unit tests of rules for it, written as tables."""

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from tests.component.monitoring import queries
from tests.prometheus_binaries import programs

Labels = Mapping[str, str]
Document = dict[str, Any]
NO_LABELS: Labels = MappingProxyType({})
# Rules read what groups before theirs have just recorded.
ORDER = (
    "gpu-node-agent-recording",
    "gpu-node-agent-chargeback",
    "gpu-node-agent-capacity",
    "gpu-node-agent-alerts",
    "gpu-node-agent-extender",
    "gpu-node-agent-opencost",
    "gpu-node-agent-dcgm-names",
)


def promtool(*arguments: str, text: str = "") -> tuple[int, str]:
    """Its exit status, and everything that it printed."""
    done = subprocess.run(
        [programs() / "promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def series(metric: str, values: str, **labels: str) -> Document:
    """One input series, with a value a minute in promtool's notation."""
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{metric}{{{inside}}}", "values": values}


def restarted(metric: str, value: float, before: Labels = NO_LABELS, /, **labels: str) -> Iterator[Document]:
    """The same figure of two targets: one ends in minute 10, its successor begins in minute 12.

    `before`: labels that only the first one has, or has otherwise.
    """
    first = {**labels, **before}
    yield series(metric, f"{value!r}x10 stale", **first, instance="10.0.0.1:9446", job="first")
    yield series(metric, f"_x12 {value!r}x120", **labels, instance="10.0.0.2:9446", job="second")


def check(
    folder: Path, test: Document, rules: Sequence[Path] = tuple(queries.RULES), every: str = "1m"
) -> None:
    """Have promtool run one unit test of the rules. AssertionError with its words."""
    unit = {
        "rule_files": [str(path) for path in rules],
        "evaluation_interval": every,
        "group_eval_order": list(ORDER),
        "tests": [{"interval": "1m", **test}],
    }
    path = folder / "unit.yaml"
    path.write_text(yaml.safe_dump(unit))
    code, answer = promtool("test", "rules", str(path))
    assert code == 0, answer


def holds(minute: int, expression: str, samples: Mapping[str, float]) -> Document:
    """That a query has these samples, by their labels in braces, and no others at that minute."""
    return {
        "expr": expression,
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
    }


def in_1024ths(minute: int, expression: str, samples: Mapping[str, float]) -> Document:
    """The same for what was added up in steps that are no binary fractions."""
    rounded = {labels: round(value * 1024) / 1024 for labels, value in samples.items()}
    return holds(minute, f"round({expression}, 1 / 1024)", rounded)


def fires(minute: int, alert: str, firing: Iterable[tuple[Labels, str]] = ()) -> Document:
    """That the alert fires for these labels, each with its `$value` as a text has it, and for no others."""
    rule = rule_of(alert)
    return {
        "eval_time": f"{minute}m",
        "alertname": alert,
        "exp_alerts": [
            {
                "exp_labels": {**rule["labels"], **labels},
                "exp_annotations": {
                    key: _rendered(text, labels, value) for key, text in rule["annotations"].items()
                },
            }
            for labels, value in firing
        ],
    }


def rule_of(alert: str) -> Document:
    """An alert as the chart ships it."""
    (rule,) = (each for each in _rules() if each.get("alert") == alert)
    return rule


@cache
def _rules() -> tuple[Document, ...]:
    return tuple(
        each
        for path in queries.RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for each in group["rules"]
    )


def _rendered(text: str, labels: Labels, value: str) -> str:
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), text)
    return re.sub(r"{{ \$value(?: \| \w+)? }}", value, text)
