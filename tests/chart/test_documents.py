"""Pieces to copy from the documents: helm takes the commands and values, Kubernetes the objects."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.chart import helm
from tests.chart.documents import commands

ROOT = helm.CHART.parents[1]
README = ROOT / "README.md"
PUBLISHED = "oci://registry.example.com/gpu/charts/gpu-node-agent"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def rendered(words: list[str]) -> list[helm.Manifest]:
    """The chart as helm renders it with the flags of a command."""
    own = ("--create-namespace", "--reset-then-reuse-values")
    flags = [word for word in words if word not in own]
    text = helm.run(
        "template",
        "gpu-node-agent",
        str(helm.CHART),
        "--namespace=gpu-node-agent",
        f"--kube-version={helm.NEWEST}",
        *flags,
    )
    return [found for found in yaml.safe_load_all(text) if found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_helm_takes_its_commands(document: Path) -> None:
    for words in commands(document):
        if words[0] != "helm":
            assert rendered(words)
        elif words[2] != "...":
            assert words[3] in ("charts/gpu-node-agent", PUBLISHED)
            assert [words[2], *words[4:6]] == ["gpu-node-agent", "--namespace", "gpu-node-agent"]
            assert rendered(words[6:])


def test_the_readme_installs_with_and_without_gpus() -> None:
    simulated, base = commands(README)
    assert simulated[:2] == base[:2] == ["helm", "install"]
    assert "simulator.enabled=true" in simulated


def blocks(document: Path) -> list[Any]:
    """Documents of all YAML blocks of a page."""
    text = document.read_text(encoding="utf-8")
    return [
        each
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for each in yaml.safe_load_all(block)
    ]


# KServe's object is not Kubernetes': tests/unit/test_developers.py looks at its limits.
PODS = sorted(set((ROOT / "config/examples").glob("*/*.yaml")) - {ROOT / "config/examples/work/kserve.yaml"})


@pytest.mark.parametrize("file", PODS, ids=lambda file: file.stem)
def test_kubernetes_takes_the_example_pods(file: Path) -> None:
    (pod,) = yaml.safe_load_all(file.read_text())
    kubernetes_validate.validate(pod, "1.36", strict=True)


def test_helm_takes_the_values_of_the_monitoring_page(tmp_path: Path) -> None:
    values = blocks(ROOT / "docs" / "monitoring.md")[0]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    kinds = {each["kind"] for each in helm.template(file)}
    assert {"PodMonitor", "PrometheusRule", "MonitorDashboard"} <= kinds
    assert set(values) == {"metrics", "platform", "attribution"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_values_that_are_named_have_the_default_that_is_told(document: Path) -> None:
    """Tables `value | default`: every value exists, with that default."""
    values = yaml.safe_load((helm.CHART / "values.yaml").read_text())
    for table in re.findall(
        r"^\| value \| default \|.*?\n\n", document.read_text(), re.DOTALL | re.MULTILINE
    ):
        for line in table.strip().splitlines()[2:]:
            names, defaults = (cell.strip() for cell in line.strip("|").split("|")[:2])
            told = [yaml.safe_load(each.strip("` ")) for each in defaults.split(", ")]
            keys = [key for key in re.findall(r"`([^`]+)`", names) if not key.endswith("*")]
            for number, key in enumerate(keys):
                found = values
                for part in key.split("."):
                    found = found[part]
                expected = told[number] if len(told) == len(keys) else told[0]
                if key in ("affinity", "nodeSelector", "tolerations"):
                    continue  # described in words
                assert found == ("" if expected in (None, "empty") else expected), key
