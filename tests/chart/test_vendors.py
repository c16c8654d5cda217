"""Needs of single vendors' clusters: a quota for priority classes, OpenShift's constraints."""

from typing import Any

import pytest

from tests.chart import helm
from tests.chart.helm import Manifest

# Required by the API (OpenShift 4.11 to 4.20).
REQUIRED = {
    "allowHostDirVolumePlugin", "allowHostIPC", "allowHostNetwork", "allowHostPID", "allowHostPorts",
    "allowPrivilegedContainer", "allowedCapabilities", "defaultAddCapabilities", "priority",
    "readOnlyRootFilesystem", "requiredDropCapabilities", "volumes",
}  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "default": (),
    "nobody shares": ("vgpu.enabled=false",),
    "driver on the host": ('driver.source="host"',),
    "mps": ("mps.enabled=true",),
    "network": ("hostNetwork=true",),
}


def test_nothing_of_them_comes_by_default() -> None:
    kinds = {each["kind"] for each in helm.template()}
    assert not kinds & {"ResourceQuota", "SecurityContextConstraints"}


def test_the_quota_covers_every_priority_class_of_the_release() -> None:
    made = helm.template(
        settings=[
            "priorityClassQuota.enabled=true",
            "extender.enabled=true",
            "extender.config.http.verbs=true",
        ]
    )
    (selector,) = helm.one(made, "ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    pods = [
        each["spec"]["template"]["spec"]
        for each in made
        if each["kind"] in ("DaemonSet", "Deployment", "Job")
    ]
    asked = {pod["priorityClassName"] for pod in pods if "priorityClassName" in pod}
    assert asked == {"system-node-critical", "system-cluster-critical"} == set(selector["values"])
    assert selector | {"values": []} == {"scopeName": "PriorityClass", "operator": "In", "values": []}


def test_the_quota_has_no_class_that_nobody_has() -> None:
    made = helm.template(settings=["priorityClassQuota.enabled=true"])
    (selector,) = helm.one(made, "ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    assert selector["values"] == ["system-node-critical"]


@pytest.mark.parametrize("mode", MODES)
def test_openshift_grants_what_the_agents_ask_for_and_no_more(mode: str) -> None:
    made = helm.template(settings=["openshift.enabled=true", *MODES[mode]])
    granted = helm.one(made, "SecurityContextConstraints")
    assert granted.keys() >= REQUIRED
    pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert granted["allowPrivilegedContainer"] is security["privileged"]
    assert granted["allowHostPID"] is pod.get("hostPID", False)
    assert granted["allowHostNetwork"] is granted["allowHostPorts"] is pod.get("hostNetwork", False)
    assert granted["allowHostIPC"] is False
    assert granted["readOnlyRootFilesystem"] is True
    assert {next(key for key in volume if key != "name") for volume in pod["volumes"]} <= set(
        granted["volumes"]
    )
    if not security["privileged"]:
        assert granted["requiredDropCapabilities"] == security["capabilities"]["drop"]
        assert granted["seccompProfiles"] == ["runtime/default"]
        assert granted["allowPrivilegeEscalation"] is False


def test_openshift_lets_each_account_use_its_own_constraints() -> None:
    made = helm.template(
        settings=["openshift.enabled=true", "extender.enabled=true", "extender.config.http.verbs=true"]
    )
    constraints = helm.one(made, "SecurityContextConstraints")["metadata"]["name"]
    (rule,) = helm.one(made, "ClusterRole", "-scc")["rules"]
    assert rule == {
        "apiGroups": ["security.openshift.io"],
        "resources": ["securitycontextconstraints"],
        "resourceNames": [constraints],
        "verbs": ["use"],
    }

    def subjects(ending: str) -> set[str]:
        return {each["name"] for each in helm.one(made, "RoleBinding", ending)["subjects"]}

    assert subjects("-scc") == {account(helm.one(made, "DaemonSet"))}
    others = {account(each) for each in made if each["kind"] in ("Deployment", "Job")}
    others.add(helm.one(helm.template(tests=True), "Pod")["spec"]["serviceAccountName"])
    assert subjects("-nonroot") == others
    assert helm.one(made, "RoleBinding", "-nonroot")["roleRef"]["name"] == "system:openshift:scc:nonroot-v2"


def account(workload: Manifest) -> Any:
    return workload["spec"]["template"]["spec"]["serviceAccountName"]
