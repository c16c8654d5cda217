"""`helm test`, and the Job for clusters without the chart: a node is looked at, its root read-only."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent import settings
from agent.cli import main as cli
from tests.chart import helm
from tests.chart.helm import Manifest
from tests.chart.test_rendering import MINORS

JOB = Path(__file__).parents[2] / "config" / "preflight.yaml"
ENDING = "-preflight"


def job_for(node: str, image: str) -> str:
    """The file with the page's two replacements: the first in each line, as sed makes them."""
    words = (("THIS_NODE", node), ("THIS_IMAGE", image))
    lines = JOB.read_text().splitlines()
    for old, new in words:
        lines = [line.replace(old, new, 1) for line in lines]
    return "\n".join(lines)


@cache
def rendered(values: Path | None = None, kubernetes: str = helm.NEWEST) -> tuple[Manifest, ...]:
    return tuple(helm.template(values, kubernetes=kubernetes, tests=True))


def hooks(made: Sequence[Manifest]) -> list[Manifest]:
    return [each for each in made if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


def pod_of(made: Sequence[Manifest], *, hook: bool = True) -> dict[str, Any]:
    of_test = hooks(made)
    found = of_test if hook else [each for each in made if each not in of_test]
    spec: dict[str, Any] = helm.one(found, "DaemonSet")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("minor", MINORS)
def test_every_version_of_kubernetes_knows_every_field(minor: str) -> None:
    for each in hooks(rendered(kubernetes=f"{minor}.0")):
        kubernetes_validate.validate(each, minor, strict=True)


def test_every_node_with_an_agent_is_looked_at_as_the_agent_is_run(values: Path) -> None:
    made = rendered(values)
    for each in hooks(made):
        kubernetes_validate.validate(each, MINORS[-1], strict=True)
    looking, agent = pod_of(made), pod_of(made, hook=False)
    for key in ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "serviceAccountName"):
        assert looking.get(key) == agent.get(key), key
    assert looking.get("hostPID") == agent.get("hostPID")
    (container,), (its,) = looking["containers"], agent["containers"]
    assert container["securityContext"] == its["securityContext"]
    assert container["env"] == its["env"]
    # Nothing is served there: no certificate is needed.
    theirs = [each for each in its["volumeMounts"] if each["name"] != "tls"]
    mounts = [each for each in container["volumeMounts"] if each["name"] != "host-root"]
    assert mounts == theirs
    (root,) = [each for each in container["volumeMounts"] if each["name"] == "host-root"]
    assert root["readOnly"] is True
    assert f"--host-root={root['mountPath']}" in container["args"]


def test_it_is_found_by_who_gathers_the_answers() -> None:
    made = hooks(rendered())
    daemonset, report = helm.one(made, "DaemonSet"), helm.one(made, "Pod")
    (container,) = report["spec"]["containers"]
    options = cli._parser().parse_args(container["args"])
    assert options.daemonset == [daemonset["metadata"]["name"]]
    assert options.namespace == daemonset["metadata"]["namespace"]
    assert daemonset["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "preflight"
    assert options.timeout < report["spec"]["activeDeadlineSeconds"]
    assert container["securityContext"]["runAsNonRoot"] is True
    (role,) = [each for each in made if each["kind"] == "Role"]
    rights = [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in role["rules"]]
    assert rights == [(["pods"], None, ["list"]), (["daemonsets"], [daemonset["metadata"]["name"]], ["get"])]
    assert not [each for each in made if each["kind"].startswith("Cluster")]


def test_all_of_it_is_there_for_the_test_only() -> None:
    assert len(hooks(rendered())) == 5
    others = [each for each in rendered() if each not in hooks(rendered())]
    assert not [each for each in others if each["metadata"]["name"].endswith(ENDING)]
    assert not hooks(helm.template(settings=["preflight.enabled=false"], tests=True))


@pytest.mark.parametrize(("kubernetes", "there"), [("1.30.0", False), ("1.34.0", True)])
def test_mounts_below_the_root_are_read_only_where_kubernetes_can(kubernetes: str, there: bool) -> None:
    (container,) = pod_of(rendered(kubernetes=kubernetes))["containers"]
    (root,) = [each for each in container["volumeMounts"] if each["name"] == "host-root"]
    assert (root.get("recursiveReadOnly") == "IfPossible") is there


def test_the_job_can_be_applied_and_its_command_understood() -> None:
    text = job_for("node-1", "registry.example/agent:1")
    found = list(yaml.safe_load_all(text))
    for each in found:
        for minor in MINORS:
            kubernetes_validate.validate(each, minor, strict=True)
    (job,) = [each for each in found if each["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeName"] == "node-1"
    (container,) = pod["containers"]
    options = cli._parser().parse_args(container["args"])
    assert str(options.host_root) == "/host"
    loaded = settings.load(None, {}, options.set)
    assert loaded.driver.root == "/host"
    assert loaded.injection.host_driver_root == "/"
    assert [each["name"] for each in container["env"]] == ["GPU_NODE_AGENT_CLUSTER_NODE_NAME"]
    assert container["image"] == "registry.example/agent:1"
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert mounts == {"/host": True, "/tmp": False}


def test_the_job_s_account_may_be_privileged_on_openshift() -> None:
    """OpenShift admits privileged pods by security context constraints, not by the namespace's label."""
    found = {each["kind"]: each for each in yaml.safe_load_all(job_for("node-1", "registry.example/agent:1"))}
    assert {
        "apiGroups": ["security.openshift.io"],
        "resources": ["securitycontextconstraints"],
        "resourceNames": ["privileged"],
        "verbs": ["use"],
    } in found["ClusterRole"]["rules"]
    (subject,) = found["ClusterRoleBinding"]["subjects"]
    assert subject["name"] == found["Job"]["spec"]["template"]["spec"]["serviceAccountName"]
