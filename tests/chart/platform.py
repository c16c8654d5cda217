"""The platform's ConfigMaps as plain files, for use without helm: `python -m tests.chart.platform`.

The chart is their source; `config/platform` is written from what it renders.
"""

from pathlib import Path

import yaml

from tests.chart import helm
from tests.chart.helm import Manifest

FILE = Path(__file__).parents[2] / "config" / "platform" / "cf-crl.yaml"
HEADER = (
    "# Written by `make docs` from charts/gpu-node-agent/files/platform.yaml; kubectl apply -f this file.\n"
)
OF_A_RELEASE = ("app.kubernetes.io/", "helm.sh/")


def objects() -> list[Manifest]:
    """All ConfigMaps of the platform, without the labels of a release."""
    found = [
        each
        for each in helm.template(settings=["platform.enabled=true", "mps.enabled=true"])
        if each["metadata"]["name"].startswith("cf-crl-")
    ]
    for each in found:
        labels = each["metadata"]["labels"]
        kept = {key: value for key, value in labels.items() if not key.startswith(OF_A_RELEASE)}
        each["metadata"]["labels"] = kept
    return found


def text() -> str:
    """The file's content."""
    return HEADER + yaml.safe_dump_all(objects(), allow_unicode=True, sort_keys=False, width=110)


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
