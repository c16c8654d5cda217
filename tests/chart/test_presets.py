"""Presets: where the agent's own NVML comes from, by kind of cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import helm
from tests.chart.test_privilege import agent

PRESETS = {
    # privileged, RuntimeClass, driver root on the host, further objects
    "auto": (False, None, "/", set()),
    "toolkit": (False, None, "/", set()),
    "runtimeclass": (False, "nvidia", "/", set()),
    "k3s": (False, "nvidia", "/", set()),
    "operator": (False, "nvidia", "/run/nvidia/driver", set()),
    "aks": (False, None, "/", set()),
    "gke": (True, None, "/home/kubernetes/bin/nvidia", {"ResourceQuota"}),
    "openshift": (True, None, "/run/nvidia/driver", {"SecurityContextConstraints"}),
    "bottlerocket": (False, None, "/", set()),
    "host": (True, None, "/", set()),
}
VENDORS = {"ResourceQuota", "SecurityContextConstraints"}


def _configuration(made: list[helm.Manifest]) -> dict[str, Any]:
    (config,) = [each for each in made if "config.yaml" in each.get("data", {})]
    loaded: dict[str, Any] = yaml.safe_load(config["data"]["config.yaml"])
    return loaded


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_a_set_of_values(preset: str) -> None:
    privileged, runtime_class, root, objects = PRESETS[preset]
    made = helm.template(settings=[f"preset={json.dumps(preset)}"])
    pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] is privileged
    assert pod.get("runtimeClassName") == runtime_class
    assert {each["kind"] for each in made} & VENDORS == objects
    config = _configuration(made)
    assert config["injection"]["hostDriverRoot"] == root
    mounted = {each["name"]: each for each in container["volumeMounts"]}
    seen_at = mounted["driver" if privileged else "driver-files"]["mountPath"]
    looked_at = config["driver"]["root"] if privileged else config["injection"]["driverRoot"]
    assert Path(seen_at).is_relative_to(looked_at)


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"auto"}))
def test_each_preset_has_an_example_and_a_row_in_the_documents(preset: str) -> None:
    example = yaml.safe_load((helm.CHART / "ci" / f"{preset}-values.yaml").read_text())
    assert example["preset"] == preset
    install = (helm.CHART.parents[1] / "docs" / "install.md").read_text()
    assert f"| `{preset}` |" in install


def test_the_schema_names_the_same_presets() -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["preset"]["enum"]) == set(PRESETS)
    with pytest.raises(helm.HelmRefused, match="preset"):
        helm.template(settings=['preset="eks"'])


def test_what_a_value_says_goes_before_the_preset() -> None:
    pod = agent('preset="operator"', 'driver.source="host"', 'driver.hostRoot="/opt/driver"')
    assert pod["containers"][0]["securityContext"]["privileged"] is True
    assert "runtimeClassName" not in pod
    (driver,) = [each for each in pod["volumes"] if each["name"] == "driver"]
    assert driver["hostPath"]["path"] == "/opt/driver"
    assert agent('preset="toolkit"', 'runtimeClassName="other"')["runtimeClassName"] == "other"


def test_what_costs_nothing_elsewhere_is_there_wherever_a_runtime_brings_the_driver() -> None:
    note, mount = "nvidia.cdi.k8s.io/container.agent", "/var/run/nvidia-container-devices/all"
    for setting, there in (("port=9446", True), ('preset="host"', False), ("simulator.enabled=true", False)):
        template = helm.one(helm.template(settings=[setting]), "DaemonSet")["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert (note in template["metadata"]["annotations"]) is there
        assert (mount in {each["mountPath"] for each in container["volumeMounts"]}) is there


def test_mps_takes_the_driver_root_of_the_preset() -> None:
    pod = agent('preset="operator"', "mps.enabled=true")
    (driver,) = [each for each in pod["volumes"] if each["name"] == "driver"]
    assert driver["hostPath"]["path"] == "/run/nvidia/driver"
    assert "runtimeClassName" not in pod
