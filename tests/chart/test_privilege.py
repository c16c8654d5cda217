"""Least privilege: what each mode needs, and no more; docs/security.md says why."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cleanup.request import REPORT, REQUEST
from agent.settings import load as settings_of
from tests.chart import helm
from tests.chart.helm import Manifest

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
DROPPED = {"drop": ["ALL"]}
OF_OTHERS = r"-cleanup$|-gpu-(viewer|operator)$"  # roles: of the hook, and of people


SLICES = 'config.layouts={"cut": [{"gpus": ["all"], "mode": "pgpu", "replicas": 4}]}'


def pods(objects: tuple[Manifest, ...] | list[Manifest]) -> list[dict[str, Any]]:
    kinds = ("DaemonSet", "Deployment", "Job")
    return [each["spec"]["template"]["spec"] for each in objects if each["kind"] in kinds]


def agent(*settings: str) -> dict[str, Any]:
    made = helm.template(settings=settings)
    found = helm.one(made, "DaemonSet")
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def test_every_container_is_tied_down(objects: tuple[Manifest, ...]) -> None:
    for pod in pods(objects):
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            if security["privileged"]:
                continue
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == DROPPED
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_by_default_nothing_is_privileged() -> None:
    for pod in pods(helm.template()):
        assert "hostNetwork" not in pod
        assert "hostIPC" not in pod
        every = [*pod["containers"], *pod.get("initContainers", [])]
        assert not any(container["securityContext"]["privileged"] for container in every)


@pytest.mark.parametrize(
    ("settings", "privileged", "host_pid"),
    [
        ((), False, True),
        (("attribution.enabled=false",), False, False),
        # Nobody shares a GPU, or there is none to measure.
        (("vgpu.enabled=false",), False, False),
        (("simulator.enabled=true",), False, False),
        (("vgpu.enabled=false", "attribution.enabled=true"), False, True),
        (("vgpu.enabled=false", SLICES), False, True),
        (('driver.source="host"',), True, True),
        (("mps.enabled=true", "attribution.enabled=false"), True, True),
        (("mig.manage=true", "attribution.enabled=false"), True, False),
        (("mig.manage=true", "simulator.enabled=true"), False, False),
    ],
    ids=[
        "default",
        "off",
        "whole",
        "simulated",
        "on",
        "slices",
        "host",
        "mps",
        "mig",
        "no mig",
    ],
)
def test_privilege_comes_with_what_needs_it(
    settings: tuple[str, ...], privileged: bool, host_pid: bool
) -> None:
    pod = agent(*settings)
    (container,) = pod["containers"]
    assert container["securityContext"]["privileged"] is privileged
    assert pod.get("hostPID", False) is host_pid


PRESETS = (
    *("toolkit", "runtimeclass", "k3s", "operator", "aks", "gke", "openshift", "bottlerocket", "host"),
    *("talos", "k0s", "microk8s"),
)


def test_what_each_preset_gives_for_measured_figures_is_written_down() -> None:
    """Whether the agent is privileged, and whether it sees the host's process IDs, by default."""
    told = {
        name: (privileged.startswith("yes"), pids.startswith("yes"))
        for names, privileged, pids, _ in rows("### By preset")
        for name in names.replace("`", "").split(", ")
    }
    found = {}
    for preset in PRESETS:
        pod = agent(f'preset="{preset}"')
        found[preset] = (
            pod["containers"][0]["securityContext"]["privileged"],
            pod.get("hostPID", False),
        )
    assert told == found


@pytest.mark.parametrize(
    ("setting", "read"),
    [("port=9446", False), ('driver.source="host"', True), ("mps.enabled=true", True)],
)
def test_kernel_log_is_read_where_it_can_be_opened(setting: str, read: bool, tmp_path: Path) -> None:
    made = helm.template(settings=[setting])
    (config,) = [each for each in made if "config.yaml" in each.get("data", {})]
    (tmp_path / "config.yaml").write_text(config["data"]["config.yaml"])
    found = settings_of(tmp_path / "config.yaml", {}).health.kernel_log
    assert found == ("/dev/kmsg" if read else None)


def test_host_folders_are_read_only_where_nothing_is_written() -> None:
    mounts = {each["name"]: each for each in agent()["containers"][0]["volumeMounts"]}
    assert {name for name, each in mounts.items() if each.get("readOnly")} == {
        "config",
        "device-plugins",
        "cdi-static",
        "driver-files",
        "all-gpus",
        "cgroups",
    }
    assert not {name for name, each in mounts.items() if each.get("mountPropagation")}
    shares = {each["name"]: each for each in agent("mps.enabled=true")["containers"][0]["volumeMounts"]}
    assert shares["run"]["mountPropagation"] == "Bidirectional"
    assert not shares["cgroups"].get("readOnly")
    assert set(shares) - set(mounts) == {"driver"}


def test_volumes_of_pods_are_not_kept_mounted() -> None:
    """A mount that pods' volumes lie below follows the host's, else they stay busy when detached."""
    leaves = {"device-plugins", "plugins_registry", "pod-resources"}
    pod = agent("mps.enabled=true", "dra.enabled=true", 'driver.source="host"')
    mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    above = set()
    for each in pod["volumes"]:
        path = Path(each["hostPath"]["path"]) if "hostPath" in each else Path("/nowhere")
        kubelet = Path("/var/lib/kubelet")
        if path in (kubelet, *kubelet.parents) or (kubelet in path.parents and path.name not in leaves):
            above.add(each["name"])
            assert mounts[each["name"]].get("mountPropagation") == "HostToContainer", path
    assert "kubelet" in above


def test_every_host_folder_has_its_reason_written_down() -> None:
    """Path by path, and whether it can be written: by default, and with MPS and claims."""
    told = {row[0].split("`")[1]: row[1] for row in rows("## Host folders") if row[2]}
    assert "only with `config.injection.gds`" in told.pop("/dev")

    def mounted(*settings: str) -> dict[str, bool]:
        pod = agent(*settings)
        paths = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
        mounts = pod["containers"][0]["volumeMounts"]
        return {paths[m["name"]]: not m.get("readOnly", False) for m in mounts if m["name"] in paths}

    plain, shares = mounted(), mounted("mps.enabled=true", "dra.enabled=true", "mig.manage=true")
    assert set(told) == set(plain) | set(shares)
    for path, writable in (plain | shares).items():
        assert ("only with" in told[path]) == (path not in plain), path
        assert ("not with" in told[path]) == (path not in shares), path
        if path in plain and plain[path] != writable:
            assert told[path] == "read-only; with MPS read-write"
        elif path in plain:
            assert told[path].startswith("read-write" if writable else "read-only"), path


@pytest.mark.parametrize(
    ("more", "there"),
    [((), True), (("mps.enabled=true",), False), (('driver.source="host"',), False)],
)
def test_device_nodes_are_seen_where_one_of_them_is_wanted(more: tuple[str, ...], there: bool) -> None:
    """Below the driver root of an agent that has no other way to see them; never to be written."""
    assert "devices" not in {each["name"] for each in agent(*more)["volumes"]}
    pod = agent("config.injection.gds=true", *more)
    mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    found = {
        mounts[name]["mountPath"] for name in ("devices", "udev") if mounts.get(name, {}).get("readOnly")
    }
    assert found == ({"/driver-root/dev", "/driver-root/run/udev"} if there else set())


def test_instances_are_made_with_the_hosts_driver_and_its_capabilities() -> None:
    """The driver is the host's, and nothing of it is written; of the cluster no right comes with it."""
    pod = agent("mig.manage=true")
    mounts = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["nvidia-caps"] == {"name": "nvidia-caps", "mountPath": "/dev/nvidia-caps"}
    assert mounts["driver"]["readOnly"] is True
    made = helm.template(settings=["mig.manage=true"])
    config = yaml.safe_load(helm.one(made, "ConfigMap", "gpu-node-agent")["data"]["config.yaml"])
    assert config["mig"] == {"manage": True}
    assert verbs(_agent_role(made)) == AGENT_VERBS
    assert "nvidia-caps" not in {each["name"] for each in agent()["volumes"]}


def test_hook_needs_no_host_and_no_root() -> None:
    (job,) = [each for each in helm.template(settings=["mps.enabled=true"]) if each["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    assert not pod.get("volumes")
    assert "hostPID" not in pod
    (container,) = pod["containers"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert job["spec"]["backoffLimit"] == 0


AGENT_VERBS = {
    "nodes": {"list", "watch", "patch"},
    "nodes/status": {"patch"},
    "pods": {"get", "list", "watch", "patch"},
    "namespaces": {"list", "watch"},
    "events": {"create", "patch"},
}


def verbs(role: Manifest) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for resource in rule["resources"]:
            found.setdefault(resource, set()).update(rule["verbs"])
    return found


def test_rights_of_the_agent() -> None:
    made = helm.template()
    roles = [
        each
        for each in made
        if each["kind"] == "ClusterRole" and not re.search(OF_OTHERS, each["metadata"]["name"])
    ]
    (role,) = roles
    assert verbs(role) == AGENT_VERBS
    assert not any("*" in word for rule in role["rules"] for words in rule.values() for word in words)


def test_pods_are_written_only_where_choices_are() -> None:
    made = helm.template(settings=["config.vgpu.writeChoice=false"])
    (role,) = [
        each
        for each in made
        if each["kind"] == "ClusterRole" and not re.search(OF_OTHERS, each["metadata"]["name"])
    ]
    assert verbs(role)["pods"] == {"get", "list", "watch"}


CLAIM_VERBS = {
    "resourceslices": {"get", "list", "watch", "create", "update", "delete"},
    "resourceclaims": {"get", "list", "watch"},
    "resourceclaims/status": {"update"},
    "resourceclaims/driver": {"associated-node:update"},
}


def test_rights_on_claims_come_with_the_door() -> None:
    """Classes for users, and rights on slices with the policy that bounds them; no more of the host."""
    made = helm.template(settings=["dra.enabled=true", "config.vgpu.writeChoice=false"])
    role = helm.one(made, "ClusterRole", "-dra")
    assert verbs(role) == CLAIM_VERBS
    (driver,) = [each for each in role["rules"] if each["resources"] == ["resourceclaims/driver"]]
    assert driver["resourceNames"] == ["gpu-node-agent.io"]
    classes = [each["metadata"]["name"] for each in made if each["kind"] == "DeviceClass"]
    assert classes == ["gpu-whole"]  # without MPS there are no shares
    assert "patch" in verbs(_agent_role([each for each in made if each is not role]))["pods"]
    policy = helm.one(made, "ValidatingAdmissionPolicy", "-own-slices")
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert helm.one(made, "ValidatingAdmissionPolicyBinding", "-own-slices")["spec"]["validationActions"] == [
        "Deny"
    ]
    pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
    # With the kubelet's keys in it: not for a container without privilege.
    assert "kubelet" not in {each["name"] for each in pod["volumes"]}
    plain = helm.template()
    assert not [each for each in plain if "dra" in each["metadata"]["name"] or each["kind"] == "DeviceClass"]


def test_classes_of_claims() -> None:
    made = helm.template(settings=["dra.enabled=true", "mps.enabled=true", "dra.extendedResource=true"])
    classes = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "DeviceClass"}
    assert classes.keys() == {"gpu-whole", "gpu-mps"}
    assert classes["gpu-whole"]["extendedResourceName"] == "nvidia.com/gpu"
    assert "extendedResourceName" not in classes["gpu-mps"]
    none = helm.template(settings=["dra.enabled=true", "dra.classes=false"])
    assert not [each for each in none if each["kind"] == "DeviceClass"]


def test_the_right_to_signal_others_comes_with_the_option_that_ends_containers() -> None:
    ends = ('config.vgpu.enforcement="library"', 'config.vgpu.aboveCap="end"')
    off = ('config.vgpu.enforcement="off"', *ends[1:])
    for settings, added in ((ends, ["KILL"]), (ends[1:], ["KILL"]), (ends[:1], None), (off, None)):
        (container,) = agent(*settings)["containers"]
        assert container["securityContext"]["capabilities"].get("add") == added
        made = helm.template(settings=(*settings, "openshift.enabled=true"))
        (granted,) = [each for each in made if each["kind"] == "SecurityContextConstraints"]
        assert granted["allowedCapabilities"] == (added or [])


def test_the_host_s_cgroups_are_mounted_where_limits_are_enforced() -> None:
    for settings, mounted in (
        ((), True),
        (('config.vgpu.enforcement="off"',), False),
        (('config.vgpu.enforcement="library"',), True),
        (('config.vgpu.enforcement="library"', "vgpu.enabled=false"), False),
    ):
        made = helm.template(settings=settings)
        pod = helm.one(made, "DaemonSet")["spec"]["template"]["spec"]
        assert any(each["name"] == "cgroups" for each in pod["volumes"]) is mounted
        assert any(each["name"] == "cgroups" for each in pod["containers"][0]["volumeMounts"]) is mounted
        config = yaml.safe_load(helm.one(made, "ConfigMap", "gpu-node-agent")["data"]["config.yaml"])
        assert (config.get("host", {}).get("cgroups") == "/host-cgroups") is mounted


def test_namespaces_are_read_only_where_limits_are_enforced() -> None:
    for words, reads in (("library", True), ("strict", True), ("off", False)):
        made = helm.template(settings=[f'config.vgpu.enforcement="{words}"'])
        assert ("namespaces" in verbs(_agent_role(made))) is reads
    made = helm.template(settings=['config.vgpu.enforcement="library"', "vgpu.enabled=false"])
    assert "namespaces" not in verbs(_agent_role(made))


def _agent_role(made: Sequence[Manifest]) -> Manifest:
    (role,) = [
        each
        for each in made
        if each["kind"] == "ClusterRole" and not re.search(OF_OTHERS, each["metadata"]["name"])
    ]
    return role


def test_resizes_come_with_a_policy() -> None:
    made = helm.template(
        settings=[
            'vgpu.resizers=["alice", "system:serviceaccount:ml:ops"]',
            'config.vgpu.enforcement="strict"',
        ]
    )
    policy = helm.one(made, "ValidatingAdmissionPolicy", "-resizes")
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == (
        "!(request.userInfo.username in ['alice','system:serviceaccount:ml:ops'])"
    )
    binding = helm.one(made, "ValidatingAdmissionPolicyBinding", "-resizes")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    config = yaml.safe_load(helm.one(made, "ConfigMap", "gpu-node-agent")["data"]["config.yaml"])
    assert config["vgpu"] == {"resize": True, "enforcement": "strict"}
    plain = helm.template()
    assert not [each for each in plain if each["metadata"]["name"].endswith("-resizes")]
    assert "vgpu" not in yaml.safe_load(helm.one(plain, "ConfigMap", "gpu-node-agent")["data"]["config.yaml"])


def test_rights_of_people() -> None:
    """Neither reads what its own rights on pods do not give, and neither runs anything in a pod."""
    made = helm.template()
    viewer, operator = (helm.one(made, "ClusterRole", f"-gpu-{name}") for name in ("viewer", "operator"))
    assert verbs(viewer) == {"nodes": {"get", "list"}}
    wanted = {"nodes": {"get", "list", "patch"}, "pods": {"get", "list"}, "events": {"list"}}
    assert verbs(operator) == wanted
    bound = [each["roleRef"]["name"] for each in made if each["kind"].endswith("RoleBinding")]
    assert not any(re.search(OF_OTHERS, name) for name in bound if "-cleanup" not in name)
    plain = helm.template(settings=["kubectl.roles=false", "kubectl.plugin=false"])
    assert not [each for each in plain if re.search(r"-gpu-(viewer|operator)$", each["metadata"]["name"])]
    assert not [each for each in plain if each["metadata"]["name"].endswith("-kubectl")]


def test_the_plugin_comes_whole() -> None:
    found = helm.one(helm.template(), "ConfigMap", "-kubectl")["data"]["kubectl-gpu"]
    assert found.rstrip("\n") == (helm.CHART / "files" / "kubectl-gpu").read_text().rstrip("\n")


def test_rights_of_the_hook() -> None:
    made = helm.template()
    assert verbs(helm.one(made, "ClusterRole", "-cleanup")) == {"pods": {"list"}, "nodes": {"get", "patch"}}
    role = helm.one(made, "Role", "-cleanup")
    assert verbs(role) == {"secrets": {"patch"}}
    (rule,) = role["rules"]
    (job,) = [each for each in made if each["kind"] == "Job"]
    (record,) = rule["resourceNames"]
    assert record == f"sh.helm.release.v1.{helm.RELEASE}.v1"
    assert f"--release-record={record}" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_the_hook_writes_helm_s_record_only_where_a_policy_bounds_it() -> None:
    """The record is what the next rollback applies, with the rights of the user who runs it."""
    old = helm.template(kubernetes="1.29.0")
    assert not [
        each for each in old if each["kind"] == "Role" and each["metadata"]["name"].endswith("-cleanup")
    ]
    (job,) = [each for each in old if each["kind"] == "Job"]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [each for each in args if each.startswith("--release-record")]
    for ending in ("-cleanup-nodes", "-cleanup-record"):
        policy = helm.one(helm.template(), "ValidatingAdmissionPolicy", ending)
        (condition,) = policy["spec"]["matchConditions"]
        account = job["spec"]["template"]["spec"]["serviceAccountName"]
        assert f"system:serviceaccount:{helm.NAMESPACE}:{account}'" in condition["expression"]
        assert policy["spec"]["failurePolicy"] == "Fail"
        binding = helm.one(helm.template(), "ValidatingAdmissionPolicyBinding", ending)
        assert binding["spec"]["validationActions"] == ["Deny"]


def test_the_hook_finds_the_agents() -> None:
    """Its selector is that of the DaemonSet, and its annotations are those that the policy names."""
    made = helm.template()
    (job,) = [each for each in made if each["kind"] == "Job"]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    labels = helm.one(made, "DaemonSet")["spec"]["selector"]["matchLabels"]
    (selector,) = [each.partition("=")[2] for each in args if each.startswith("--agents=")]
    assert dict(each.split("=") for each in selector.split(",")) == labels
    policy = helm.one(made, "ValidatingAdmissionPolicy", "-cleanup-nodes")
    (ours,) = [each["expression"] for each in policy["spec"]["variables"] if each["name"] == "ours"]
    assert ours == f"['{REQUEST}', '{REPORT}']"


def test_rights_are_written_down() -> None:
    """The page has a row for each right, and none for a right that nobody has."""
    made = helm.template(
        settings=[
            "extender.enabled=true",
            "extender.config.http.verbs=true",
            'config.vgpu.enforcement="library"',
            'metrics.access.secret="pki"',
            "dra.enabled=true",
        ]
    )
    accounts = {"": "agent", "-dra": "agent", "-extender": "extender", "-cleanup": "hook"}
    accounts |= {f"-gpu-{name}": f"gpu-{name}" for name in ("viewer", "operator")}
    granted: dict[tuple[str, str], set[str]] = {}
    for role in (each for each in made if each["kind"] in ("Role", "ClusterRole")):
        if role["metadata"]["name"].endswith("-metrics"):
            continue  # of those who scrape
        ending = next(key for key in sorted(accounts, reverse=True) if role["metadata"]["name"].endswith(key))
        for resource, names in verbs(role).items():
            granted.setdefault((accounts[ending], resource), set()).update(names)
    told: dict[tuple[str, str], set[str]] = {}
    for account, rights in rows("## Rights in the cluster"):
        for right in rights.split("; "):
            found = re.fullmatch(r"(`.+`): ([^()]+)(?: \(.+\))?", right)
            assert found, right
            resources, words = found.groups()
            for resource in re.findall(r"`([^`]+)`", resources):
                told.setdefault((account.split(",")[0], resource), set()).update(words.split(", "))
    assert told == granted


def test_each_rule_has_its_reason_beside_it() -> None:
    """A comment above it, in the templates to which the page sends its readers."""
    bare = []
    for file in (helm.CHART / "templates").glob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if "{{-" not in line]
        bare += [
            f"{file.name}: {lines[number + 1].strip()}"
            for number, line in enumerate(lines)
            if line.startswith("  - apiGroups:") and not lines[number - 1].lstrip().startswith("#")
        ]
    assert not bare


def rows(heading: str) -> list[list[str]]:
    """The first table below a heading of the page, without its head."""
    below = SECURITY.read_text(encoding="utf-8").split(f"{heading}\n")[1]
    table = below[below.index("\n|") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_token_is_given_to_those_who_ask_alone(objects: tuple[Manifest, ...]) -> None:
    for each in objects:
        if each["kind"] == "ServiceAccount":
            assert each["automountServiceAccountToken"] is False
    assert all(pod["automountServiceAccountToken"] is True for pod in pods(objects))
