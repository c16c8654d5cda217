"""Keeps the configuration part of values.schema.json true to the agent: `python -m tests.chart.schema`."""

import json
from pathlib import Path
from typing import Any

import msgspec

from agent import settings
from agent.extender.settings import ExtenderSettings

FILE = Path(__file__).parents[2] / "charts" / "gpu-node-agent" / "values.schema.json"


def updated(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the configuration's definitions as the agent has them now."""
    _, extender = msgspec.json.schema_components([ExtenderSettings], ref_template="#/$defs/{name}")
    return {**document, "$defs": {**settings.schema()["$defs"], **extender}}


def main() -> None:
    """Rewrite the file."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    FILE.write_text(json.dumps(updated(document), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
