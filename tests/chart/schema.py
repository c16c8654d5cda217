"""Keeps the configuration part of values.schema.json true to the agent: `python -m tests.chart.schema`."""

import json
from pathlib import Path
from typing import Any

import msgspec

from agent import settings
from agent.extender.settings import ExtenderSettings

FILE = Path(__file__).parents[2] / "charts" / "gpu-node-agent" / "values.schema.json"


ELSEWHERE = FILE.parent / "files" / "config-keys.yaml"
MISPLACED = {
    "$comment": "a key of the configuration, refused by templates/_validate.tpl with a hint at config"
}
# Keys that the chart sets itself, also below `config`: a hint at config would lead nowhere.
THE_CHARTS = {
    *("version", "modes", "http", "https", "cluster"),
    *("vgpu.resize", "dra.enabled", "mig.manage", "driver.root", "kubelet.root", "kubelet.devicePlugins"),
    *(f"host.{key}" for key in ("sysfs", "proc", "run", "cdi", "cgroups")),
}


def updated(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the configuration's definitions as the agent has them now.

    helm compares values with it before it renders anything. Keys of the configuration that stand outside
    `config` pass here, so that a template can say where they belong.
    """
    _, extender = msgspec.json.schema_components([ExtenderSettings], ref_template="#/$defs/{name}")
    made = {**document, "$defs": {**settings.schema()["$defs"], **extender}}
    own = _own(document)
    for block, keys in misplaced(document).items():
        known = own["properties"] if not block else own["properties"][block]["properties"]
        known.update(dict.fromkeys(keys, MISPLACED))
    return {**made, "properties": own["properties"]}


def _own(document: dict[str, Any]) -> dict[str, Any]:
    """A copy without what `updated` has put in."""
    copy: dict[str, Any] = json.loads(json.dumps({"properties": document["properties"]}))
    for each in (copy, *copy["properties"].values()):
        if "properties" in each:
            each["properties"] = {
                key: value for key, value in each["properties"].items() if value != MISPLACED
            }
    return copy


def misplaced(document: dict[str, Any]) -> dict[str, list[str]]:
    """Keys of the configuration that are no values of the chart, by the block of values of that name."""
    own = _own(document)["properties"]
    definitions = settings.schema()["$defs"]
    keys = definitions["Settings"]["properties"]
    found = {"": [key for key in keys if key not in own and key not in THE_CHARTS]}
    for block in sorted(keys.keys() & own.keys()):
        below = definitions[keys[block]["$ref"].rpartition("/")[2]]["properties"]
        lost = [
            key for key in below if key not in own[block]["properties"] and f"{block}.{key}" not in THE_CHARTS
        ]
        if lost:
            found[block] = lost
    return found


def elsewhere(document: dict[str, Any]) -> str:
    """The file by which the templates know them."""
    head = (
        "# Keys that belong below config, by the block of values where they are looked for. By `make docs`.\n"
    )
    return head + "".join(
        f"{json.dumps(block)}: [{', '.join(keys)}]\n" for block, keys in misplaced(document).items()
    )


def main() -> None:
    """Rewrite the files."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    FILE.write_text(json.dumps(updated(document), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    ELSEWHERE.write_text(elsewhere(document), encoding="utf-8")


if __name__ == "__main__":
    main()
