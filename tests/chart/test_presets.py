"""Presets: where the agent's own NVML comes from, by kind of cluster."""

import json
import os
import subprocess
import sys
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
    "talos": (False, "nvidia", "/", set()),
    "k0s": (False, "nvidia", "/", set()),
    "microk8s": (False, "nvidia", "/", set()),
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


def test_gke_takes_device_nodes_from_the_host_and_driver_files_from_google_s_folder() -> None:
    config = _configuration(helm.template(settings=['preset="gke"']))
    assert config["driver"]["root"] == config["injection"]["hostDriverRoot"] == "/home/kubernetes/bin/nvidia"
    assert config["driver"]["devRoot"] == "/"
    # Where CDI is not to be had: NVIDIA's variable is read by nobody there.
    assert config["injection"]["deviceNodes"] is True
    assert config["injection"]["driverMount"] == "/home/kubernetes/bin/nvidia"


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ((), "/var/lib/gpu-node-agent"),
        (('preset="gke"',), "/home/kubernetes/bin/gpu-node-agent"),
        (('preset="gke"', 'host.state="/opt/gna"'), "/opt/gna"),
    ],
)
def test_the_state_folder_is_one_on_host_and_in_the_container(settings: tuple[str, ...], state: str) -> None:
    made = helm.template(settings=settings)
    pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "state"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "state"]
    found = volume["hostPath"]["path"], mount["mountPath"], _configuration(made)["host"]["state"]
    assert found == (state,) * 3


@pytest.mark.parametrize(
    ("preset", "kubelet", "cdi"),
    [
        ("toolkit", "/var/lib/kubelet", "/var/run/cdi"),
        ("talos", "/var/lib/kubelet", "/var/cdi/dynamic"),
        ("k0s", "/var/lib/k0s/kubelet", "/var/run/cdi"),
        ("microk8s", "/var/snap/microk8s/common/var/lib/kubelet", "/var/run/cdi"),
    ],
)
def test_folders_of_kubelet_and_runtime_are_those_of_the_cluster(preset: str, kubelet: str, cdi: str) -> None:
    made = helm.template(settings=[f"preset={json.dumps(preset)}"])
    config = _configuration(made)
    assert (config["kubelet"]["root"], config["host"]["cdi"]) == (kubelet, cdi)
    # A constant of the kubelet, whatever its root is.
    assert config["kubelet"]["devicePlugins"] == "/var/lib/kubelet/device-plugins"
    pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
    paths = {each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    assert {f"{kubelet}/plugins_registry", f"{kubelet}/pod-resources", cdi} <= paths
    # The kubelet would make it, and no pod starts where it cannot.
    assert ("/etc/cdi" in paths) is (preset != "talos")
    given = helm.template(settings=[f"preset={json.dumps(preset)}", 'host.cdi="/x"', 'kubelet.root="/y"'])
    assert (_configuration(given)["host"]["cdi"], _configuration(given)["kubelet"]["root"]) == ("/x", "/y")


HOST_SIDE = """
import subprocess, sys
from pathlib import Path
from agent.injection import toolkit
from agent.vgpu import library

root, state = Path(sys.argv[1]), Path(sys.argv[2])
for folder, flags in (("var", "noexec"), ("home/kubernetes/bin", "exec")):
    (root / folder).mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=4m,{flags}", "gna", root / folder], check=True)
below = root / state.relative_to("/")
below.mkdir(parents=True)
try:
    program = toolkit.install(Path("/bin/true"), below / toolkit.FOLDER)
except toolkit.HookNotInstalled as error:
    print(error)
else:
    subprocess.run([program], check=True)
    print(library.obstacle(below) or "runs")
"""


def _on_the_host(tmp_path: Path, state: str) -> str:
    """The answer of hook and library on a node with a noexec /var, as COS has it."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = subprocess.run(
        [*unshare, sys.executable, "-c", HOST_SIDE, str(tmp_path), state],
        env={**os.environ, "PYTHONPATH": str(helm.CHART.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_preset_on_noexec_var(tmp_path: Path) -> None:
    def state(*settings: str) -> str:
        return str(_configuration(helm.template(settings=settings))["host"]["state"])

    assert _on_the_host(tmp_path / "cos", state('preset="gke"')) == "runs\n"
    assert "mounted noexec" in _on_the_host(tmp_path / "other", state('preset="host"'))


def test_the_documents_say_that_nobody_has_tried_the_presets_where_they_are_for() -> None:
    install = " ".join((helm.CHART.parents[1] / "docs" / "install.md").read_text().split())
    assert "Nobody has tried any of them on the vendors' own clusters." in install


def test_mps_takes_the_driver_root_of_the_preset() -> None:
    pod = agent('preset="operator"', "mps.enabled=true")
    (driver,) = [each for each in pod["volumes"] if each["name"] == "driver"]
    assert driver["hostPath"]["path"] == "/run/nvidia/driver"
    assert "runtimeClassName" not in pod
