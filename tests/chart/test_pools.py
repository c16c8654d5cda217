"""Pools of nodes: a DaemonSet each from one release, and no node with two agents."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import settings
from agent.cli import main as cli
from tests.chart import helm
from tests.chart.helm import HelmRefused, Manifest

VALUES = helm.CHART / "ci" / "pools-values.yaml"
POOLS: list[dict[str, Any]] = yaml.safe_load(VALUES.read_text())["pools"]
OWN = ""


def suffix(pool: str) -> str:
    return f"-pool-{pool}" if pool else "-gpu-node-agent"


def set_of(made: list[Manifest], pool: str) -> Manifest:
    return helm.one([each for each in made if not _of_test(each)], "DaemonSet", suffix(pool))


def _of_test(made: Manifest) -> bool:
    return "helm.sh/hook" in made["metadata"].get("annotations", {})


def config_of(made: list[Manifest], pool: str) -> dict[str, Any]:
    (volume,) = [
        each for each in set_of(made, pool)["spec"]["template"]["spec"]["volumes"] if each["name"] == "config"
    ]
    maps = [each for each in made if each["kind"] == "ConfigMap"]
    (found,) = [each for each in maps if each["metadata"]["name"] == volume["configMap"]["name"]]
    loaded: dict[str, Any] = yaml.safe_load(found["data"]["config.yaml"])
    return loaded


def selects(pod: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """As the scheduler and the DaemonSet's controller do."""
    if not pod.get("nodeSelector", {}).items() <= labels.items():
        return False
    required = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = required.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    return terms is None or any(
        all(_holds(each, labels) for each in term["matchExpressions"]) for term in terms
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    return {
        "In": value in expression.get("values", ()),
        "NotIn": value not in expression.get("values", ()),
        "Exists": value is not None,
    }[expression["operator"]]


@pytest.mark.parametrize("more", [(), ("simulator.enabled=true",), ("affinity=null",)])
def test_every_node_is_in_one_pool(more: tuple[str, ...]) -> None:
    """Whatever labels it has, gets or loses: the pool's agent if its selector holds, else the release's."""
    made = helm.template(VALUES, more)
    pods = {
        pool: set_of(made, pool)["spec"]["template"]["spec"]
        for pool in (OWN, *(each["name"] for each in POOLS))
    }
    accelerator, zone = "cloud.google.com/gke-accelerator", "topology.kubernetes.io/zone"
    for gpu, where in itertools.product((None, "nvidia-l4", "nvidia-h100-80gb", "x"), (None, "a", "b")):
        labels = {"nvidia-device-enable": "pgpu"}
        labels |= {key: value for key, value in ((accelerator, gpu), (zone, where)) if value}
        found = [pool for pool, pod in pods.items() if selects(pod, labels)]
        wanted = next((each["name"] for each in POOLS if each["nodeSelector"].items() <= labels.items()), OWN)
        assert found == [wanted], labels
    if not more:
        assert not any(selects(pod, {accelerator: "x"}) for pod in pods.values())


def test_a_pool_has_its_preset_and_configuration_over_the_release_s(tmp_path: Path) -> None:
    made = helm.template(VALUES)
    states = {pool: config_of(made, pool)["host"]["state"] for pool in (OWN, "l4", "h100")}
    cos = "/home/kubernetes/bin/gpu-node-agent"
    assert states == {OWN: "/var/lib/gpu-node-agent", "l4": cos, "h100": "/mnt/disks/gpu-node-agent"}
    modes = {pool: config_of(made, pool)["defaultMode"] for pool in (OWN, "l4", "h100")}
    assert modes == {OWN: "pgpu", "l4": "vgpu", "h100": "pgpu"}
    privileged = {
        pool: set_of(made, pool)["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"]
        for pool in (OWN, "l4")
    }
    assert privileged == {OWN: False, "l4": True}
    for pool in states:
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config_of(made, pool)))
        assert settings.load(file, {}, ()).cluster.access == "required"
    # What GKE asks for, though only a pool is of it.
    assert helm.one(made, "ResourceQuota")


def test_a_pool_can_switch_off_what_the_release_switches_on() -> None:
    pool = {"name": "a", "nodeSelector": {"k": "v"}, "config": {"vgpu": {"writeChoice": False}}}
    made = helm.template(settings=["config.vgpu.writeChoice=true", f"pools={json.dumps([pool])}"])
    assert [config_of(made, each)["vgpu"]["writeChoice"] for each in (OWN, "a")] == [True, False]
    # The account is one, with the rights that either needs.
    assert "patch" in helm.one(made, "ClusterRole", "-agent")["rules"][2]["verbs"]


def test_accounts_policies_and_the_release_s_own_daemonset_stay_as_they_are() -> None:
    """So an upgrade deletes nothing, and the agents of all pools are let in by one policy."""
    kinds = ("ServiceAccount", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ClusterRole")
    plain, pooled = (
        helm.template(settings=['preset="toolkit"', each]) for each in ("pools=[]", _pools("gke"))
    )
    for kind in kinds:
        assert [each for each in plain if each["kind"] == kind] == [
            each for each in pooled if each["kind"] == kind
        ]
    before, after = set_of(plain, OWN), set_of(pooled, OWN)
    assert before["metadata"] == after["metadata"]
    assert before["spec"]["selector"] == after["spec"]["selector"]
    of_pool = set_of(pooled, "a")["spec"]
    assert of_pool["selector"]["matchLabels"]["gpu-node-agent.io/pool"] == "a"
    assert of_pool["selector"]["matchLabels"].items() <= of_pool["template"]["metadata"]["labels"].items()
    accounts = {
        each["spec"]["template"]["spec"]["serviceAccountName"]
        for each in pooled
        if each["kind"] == "DaemonSet"
    }
    assert len(accounts) == 1


def _pools(*presets: str) -> str:
    names = "abcdefgh"
    return "pools=" + json.dumps(
        [
            {"name": name, "preset": preset, "nodeSelector": {"kind": name}}
            for name, preset in zip(names, presets, strict=False)
        ]
    )


def test_the_preflight_looks_at_the_nodes_of_all_pools() -> None:
    made = [each for each in helm.template(VALUES, tests=True) if _of_test(each)]
    (report,) = [each for each in made if each["kind"] == "Pod"]
    options = cli._parser().parse_args(report["spec"]["containers"][0]["args"])
    sets = [
        each for each in made if each["kind"] == "DaemonSet" and each["metadata"]["name"] in options.daemonset
    ]
    assert len(sets) == 1 + len(POOLS)
    role = helm.one(made, "Role", "-preflight")
    assert role["rules"][1]["resourceNames"] == options.daemonset


def test_a_mixed_release_on_openshift_admits_the_pods_of_all_pools() -> None:
    ends = ['config.vgpu.aboveCap="end"', "attribution.enabled=true", "openshift.enabled=true"]
    made = helm.template(settings=['preset="toolkit"', _pools("host"), *ends])
    constraints = helm.one(made, "SecurityContextConstraints")
    assert constraints["allowPrivilegedContainer"] is True
    assert constraints["allowedCapabilities"] == ["KILL"]


BAD = {
    "two with one name": (
        [{"name": "a", "nodeSelector": {"k": "1"}}, {"name": "a", "nodeSelector": {"k": "2"}}],
        ["pools has two entries of the name a"],
    ),
    "two for the same nodes": (
        [{"name": "a", "nodeSelector": {"k": "1"}}, {"name": "b", "nodeSelector": {"k": "1", "l": "2"}}],
        ["pools a and b would both select a node", "one label in common, with different values"],
    ),
    "two with labels that say nothing of each other": (
        [{"name": "a", "nodeSelector": {"k": "1"}}, {"name": "b", "nodeSelector": {"l": "1"}}],
        ["pools a and b would both select"],
    ),
    "one for all nodes": ([{"name": "a", "nodeSelector": {}}], ["nodeSelector"]),
    "no selector": ([{"name": "a", "preset": "gke"}], ["nodeSelector"]),
    "no name for an object": ([{"name": "A_1", "nodeSelector": {"k": "1"}}], ["name"]),
    "unknown preset": ([{"name": "a", "nodeSelector": {"k": "1"}, "preset": "eks"}], ["preset"]),
    "mode that is off": (
        [{"name": "a", "nodeSelector": {"k": "1"}, "config": {"defaultMode": "mps"}}],
        ["pool a: config.defaultMode is mps, but mps.enabled is false"],
    ),
    "key of the chart's": (
        [{"name": "a", "nodeSelector": {"k": "1"}, "config": {"host": {"state": "/x"}}}],
        ["pool a: config.host.state", "use the value host.state"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_pools_that_cannot_be_are_refused(name: str) -> None:
    pools, words = BAD[name]
    with pytest.raises(HelmRefused) as refusal:
        helm.template(settings=[f"pools={json.dumps(pools)}"])
    told = " ".join(str(refusal.value).split())
    assert all(word in told for word in words), told
