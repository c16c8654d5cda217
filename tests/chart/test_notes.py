"""The notes that helm prints after an install."""

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.chart import helm

HEAD = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata:\n  text: |\n"
PLAIN = "extender.config.http.verbs=true"
Told = Callable[..., str]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    """The notes under some values. helm asks a cluster for them, so a copy has them as an object."""
    copy = tmp_path / "gpu-node-agent"
    shutil.copytree(helm.CHART, copy)
    notes = (copy / "templates" / "NOTES.txt").read_text()
    (copy / "templates" / "notes.yaml").write_text(HEAD + textwrap.indent(notes, "    "))

    def render(*settings: str) -> str:
        sets = [word for each in settings for word in ("--set-json", each)]
        flags = (
            f"--namespace={helm.NAMESPACE}",
            f"--kube-version={helm.NEWEST}",
            "--show-only=templates/notes.yaml",
        )
        text: str = yaml.safe_load(helm.run("template", helm.RELEASE, str(copy), *flags, *sets))["data"][
            "text"
        ]
        return text

    return render


def test_the_next_step_is_a_label_with_a_mode_that_is_on(told: Told) -> None:
    assert "kubectl label node NODE nvidia-device-enable=pgpu" in told()
    assert "nvidia-device-enable=mps" in told("pgpu.enabled=false", "vgpu.enabled=false", "mps.enabled=true")
    assert "Nodes without a label are in mode vgpu" in told('config.defaultMode="vgpu"')


@pytest.mark.parametrize("mode", ["pgpu", "vgpu"])
def test_only_resources_of_modes_that_are_on_are_shown(mode: str, told: Told) -> None:
    resource = {"pgpu": "nvidia.com/gpu:", "vgpu": "tencent.com/vcuda-core:"}[mode]
    assert resource in told()
    assert resource not in told(f"{mode}.enabled=false")


def test_scheduler_configurations_are_named_with_what_they_need(told: Told) -> None:
    assert "config/scheduler" not in told()
    plain = told("extender.enabled=true", PLAIN)
    folder = helm.CHART.parents[1] / "config" / "scheduler"
    assert set(re.findall(r"config/scheduler/(\S+)", plain)) == {file.name for file in folder.iterdir()}
    assert "needs extender.tls.secret" in plain
    assert "needs extender.productServices" in plain
    full = told("extender.enabled=true", PLAIN, "extender.productServices=true", 'extender.tls.secret="pki"')
    assert "needs" not in full
    assert "(Secret pki)" in full
    assert "needs extender.config.http.verbs: true" in told(
        "extender.enabled=true", 'extender.tls.secret="pki"'
    )


def test_a_port_that_is_open_to_every_pod_is_told(told: Told) -> None:
    words = "Every pod of the cluster can reach port 3456"
    assert words not in told()
    assert words in told("extender.enabled=true", PLAIN)
    assert words in told("extender.enabled=true", PLAIN, "networkPolicy.enabled=true")
    assert words not in told("extender.enabled=true", 'extender.tls.secret="pki"')
    fenced = 'extender.from=[{"ipBlock": {"cidr": "10.0.0.0/28"}}]'
    assert words not in told("extender.enabled=true", PLAIN, "networkPolicy.enabled=true", fenced)


def test_an_image_that_no_registry_has_is_told(told: Told) -> None:
    assert "ImagePullBackOff" in told()
    assert "ImagePullBackOff" not in told('image.repository="registry.example/gpu-node-agent"')


def test_the_agent_to_ask_is_that_of_the_node(told: Told) -> None:
    """`exec ds/NAME` takes any of the DaemonSet's pods."""
    assert "exec ds/" not in told()
    assert "get pods -o wide -l app.kubernetes.io/component=agent" in told()


def test_what_will_be_missed_is_said(told: Told) -> None:
    assert "panels stay empty" in told("metrics.dashboards.enabled=true")
    assert "panels stay empty" not in told("metrics.dashboards.enabled=true", "metrics.rules.enabled=true")
    assert "privileged" in told("mps.enabled=true")


def test_each_pool_is_named_with_its_preset(told: Told) -> None:
    notes = told('preset="host"', 'pools=[{"name": "a", "preset": "gke", "nodeSelector": {"k": "v"}}]')
    assert "Preset host: " in notes
    assert "Pool a, preset gke: " in notes
    assert "DaemonSet test-gpu-node-agent serves the nodes that no pool selects" in notes
    assert "Pool" not in told('preset="host"')
