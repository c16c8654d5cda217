"""Every values file: helm's own checks, Kubernetes' schemas, and the agent's reading of its configuration."""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from agent import settings
from agent.model.modes import OFFERED_MODES
from agent.settings import Settings
from tests.chart import helm, schema
from tests.chart.helm import Manifest

MINORS = ("1.30", "1.34", "1.36")
OLDEST = {"dra-values.yaml": "1.36"}  # where the chart refuses older ones
# Of the Prometheus operator, the platform and OpenShift; no part of Kubernetes, so no schema of it.
FOREIGN = ("monitoring.coreos.com/v1", "ait.alauda.io/v1alpha2", "security.openshift.io/v1")


def loaded(objects: tuple[Manifest, ...], folder: Path) -> Settings:
    config = helm.one([each for each in objects if "config.yaml" in each.get("data", {})], "ConfigMap")
    file = folder / "config.yaml"
    file.write_text(config["data"]["config.yaml"])
    return settings.load(file, {}, ())


def test_helm_lints_the_values(values: Path) -> None:
    told = helm.run(
        "lint",
        "--strict",
        str(helm.CHART),
        f"--namespace={helm.NAMESPACE}",
        f"--values={values}",
        f"--kube-version={helm.NEWEST}",
    )
    assert "0 chart(s) failed" in told


@pytest.mark.parametrize("minor", MINORS)
def test_kubernetes_knows_every_field(minor: str, values: Path) -> None:
    minor = max(minor, OLDEST.get(values.name, minor))
    for each in helm.template(values, kubernetes=f"{minor}.5"):
        if each["apiVersion"] not in FOREIGN:
            kubernetes_validate.validate(each, minor, strict=True)


def test_the_agent_accepts_its_configuration(
    objects: tuple[Manifest, ...], values: Path, tmp_path: Path
) -> None:
    wanted = yaml.safe_load(values.read_text()) or {}
    found = loaded(objects, tmp_path)
    modes = {"pgpu": True, "vgpu": True, "mps": False} | {
        name: block["enabled"] for name, block in wanted.items() if name in ("pgpu", "vgpu", "mps")
    }
    assert {name: getattr(found.modes, name) for name in modes} == modes
    assert found.default_mode == wanted.get("config", {}).get("defaultMode", "none")
    assert found.cluster.access == "required"


def test_configured_folders_are_mounted(objects: tuple[Manifest, ...], tmp_path: Path) -> None:
    found = loaded(objects, tmp_path)
    pod = helm.one(objects, "DaemonSet")
    mounts = {each["mountPath"] for each in pod["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    kubelet = found.kubelet.root
    assert {
        f"{kubelet}/plugins_registry",
        f"{kubelet}/pod-resources",
        str(found.device_plugins_folder),
    } <= mounts
    assert not (found.dra.enabled and found.modes.mps) or kubelet in mounts
    assert {found.host.state, found.host.run, found.host.cdi} <= mounts
    assert found.driver.root == "/" or found.driver.root in mounts
    assert not found.modes.mps or found.host.cgroups in mounts


def test_probes_ask_what_the_agent_serves(objects: tuple[Manifest, ...], tmp_path: Path) -> None:
    container = helm.one(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz/agent", "port": "http"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    found = loaded(objects, tmp_path)
    assert ports == {"http": found.http.port} | ({"https": found.https.port} if found.https.port else {})
    named = {each["name"]: each for each in container["env"]}
    assert named["GPU_NODE_AGENT_CLUSTER_NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_every_object_has_a_namespace_and_labels(objects: tuple[Manifest, ...]) -> None:
    for each in objects:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "gpu-node-agent", each["metadata"]["name"]
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("cf-crl-"):
            assert each["metadata"]["namespace"] == "kube-public"
        elif each["kind"] == "MonitorDashboard":
            assert each["metadata"]["namespace"] == "cpaas-system"
        elif not each["kind"].startswith(("Cluster", "Validating", "SecurityContext", "DeviceClass")):
            assert each["metadata"]["namespace"] == helm.NAMESPACE


def test_two_releases_share_no_name() -> None:
    def names(namespace: str) -> set[tuple[str, str, str]]:
        return {
            (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"])
            for each in helm.template(namespace=namespace)
        }

    assert not names("one") & names("two")


def test_values_schema_knows_the_configuration_as_it_is() -> None:
    document = json.loads(schema.FILE.read_text(encoding="utf-8"))
    assert document == schema.updated(document), "run: make docs"


def test_values_schema_knows_every_default() -> None:
    document = json.loads(schema.FILE.read_text(encoding="utf-8"))
    defaults = yaml.safe_load((helm.CHART / "values.yaml").read_text(encoding="utf-8"))
    known = {key for key, value in document["properties"].items() if value != schema.MISPLACED}
    assert set(defaults) == known - {"global"}


def test_only_what_needs_a_restart_restarts() -> None:
    def digest(*more: str) -> str:
        made = helm.one(
            [each for each in helm.template(settings=more) if "-cleanup" not in each["metadata"]["name"]],
            "DaemonSet",
        )
        found: str = made["spec"]["template"]["metadata"]["annotations"]["gpu-node-agent.io/restart-digest"]
        return found

    assert digest() == digest(
        'config.defaultMode="vgpu"', 'config.logging.level="debug"', "pgpu.enabled=false"
    )
    assert digest() != digest("config.sampling.intervalSeconds=5")


def test_agents_go_everywhere_where_the_affinity_is_taken_away() -> None:
    """As the documents say it: helm keeps the default's keys under `affinity: {}`."""
    plain = helm.template(helm.CHART / "ci" / "plain-values.yaml")
    pod = helm.one(plain, "DaemonSet")["spec"]["template"]["spec"]
    assert "affinity" not in pod
    assert pod["nodeSelector"] == {"accelerator": "nvidia"}


@pytest.mark.parametrize("part", ["capacity", "allocatable"])
def test_the_agent_may_write_every_resource_that_it_may_offer(part: str) -> None:
    """All figures go in one patch: the API server refuses them together."""
    policy = helm.one(helm.template(), "ValidatingAdmissionPolicy", "-own-node")["spec"]
    lists = {each["name"]: each["expression"] for each in policy["variables"]}
    names = {name for mode in OFFERED_MODES for name in mode.resources}
    assert set(re.findall("'([^']+)'", lists["ourResources"])) == names
    (rule,) = [
        each["expression"] for each in policy["validations"] if f"status.?{part}" in each["expression"]
    ]
    prefixes = [mode.row.prefix for mode in OFFERED_MODES if mode.row.prefix]
    ours = "".join(f" || k.startsWith('{prefix}')" for prefix in prefixes)
    # What is there after the write, and what was there before it.
    assert rule.count(f".all(k, k in variables.ourResources{ours} || ") == 2


def test_old_kubernetes_gets_no_policies() -> None:
    kinds = {each["kind"] for each in helm.template(kubernetes="1.29.0")}
    assert not {kind for kind in kinds if kind.startswith("ValidatingAdmission")}
    assert "DaemonSet" in kinds
