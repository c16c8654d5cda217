"""What the API server refuses: to the agent's account, to users who write choices, to impossible pods."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from agent.node.taint import EFFECT, TAINT
from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.api import ApiClient, ApiError
from tests.cluster.install_fixtures import an_installation, audit, delete_pods, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.rig import NODE, Cluster
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "open_cluster"]

OTHER = "node2"


@pytest.fixture(scope="module")
def installed(open_cluster: Cluster) -> Iterator[Installation]:
    """The chart installed, its agent running, and a second node in the API that nobody serves."""
    with an_installation(open_cluster) as made:
        made.install()
        made.label("mixed")
        made.ready_agent()
        open_cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
        yield made
        open_cluster.delete("Node", OTHER)


@pytest.fixture
def serving(installed: Installation) -> Iterator[Installation]:
    """The same for one test, whose pods are deleted."""
    yield installed
    delete_pods(installed.cluster)


def account(serving: Installation, *, bound: bool = True) -> ApiClient:
    """The API server as the agent's account sees it; bound: with a token as the agent's pod has one."""
    pod = serving.ready_agent()["metadata"]
    reference = {"kind": "Pod", "apiVersion": "v1", "name": pod["name"], "uid": pod["uid"]}
    return acting_as(serving.cluster, NAMESPACE, RELEASE, {"boundObjectRef": reference} if bound else {})


def acting_as(
    cluster: Cluster, namespace: str, name: str, more: Mapping[str, Any] = MappingProxyType({})
) -> ApiClient:
    """The API server as a service account sees it."""
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], **more},
    }
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    return cluster.client(cluster.api.request("POST", path, request)["status"]["token"])


def node_path(name: str, part: str = "") -> str:
    return f"/api/v1/nodes/{name}{part}"


OWN_LABEL = {"metadata": {"labels": {"gpu-node-agent.io/probe": "1"}}}
FOREIGN: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (OTHER, "", OWN_LABEL, "may change that node only, not node2"),
    (OTHER, "/status", {"status": {"capacity": {"nvidia.com/gpu": "8"}}}, "may change that node only"),
    (NODE, "", {"metadata": {"labels": {"pool": "mine"}}}, "only its own labels"),
    (NODE, "", {"metadata": {"labels": {"nvidia-device-enable": "pgpu"}}}, "only its own labels"),
    (NODE, "", {"metadata": {"labels": {"kubernetes.io/os": None}}}, "only its own labels"),
    (NODE, "", {"metadata": {"annotations": {"example.com/a": "b"}}}, "only annotations gpu-node-agent.io/"),
    (NODE, "", {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, "may not change a node's spec"),
    (NODE, "", {"spec": {"taints": [{"key": TAINT, "effect": "NoExecute"}]}}, "may not change a node's spec"),
    (NODE, "", {"spec": {"unschedulable": True}}, "may not change a node's spec"),
    (NODE, "/status", {"status": {"allocatable": {"cpu": "1k"}}}, "own resources in a node's allocatable"),
    (NODE, "/status", {"status": {"capacity": {"example.com/x": "1"}}}, "own resources in a node's capacity"),
    (NODE, "/status", {"status": {"conditions": []}}, "only the condition GPUModeReady"),
    (NODE, "/status", {"status": {"addresses": []}}, "not addresses"),
    (NODE, "/status", {"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}}, "not addresses, versions"),
    (NODE, "/status", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}, "not addresses"),
    (NODE, "/status", {"status": {"volumesInUse": ["a"]}}, "only capacity, allocatable and one condition"),
    (NODE, "", {"metadata": {"finalizers": ["example.com/stay"]}}, "its finalizers"),
    (NODE, "/status", {"metadata": {"labels": {"pool": "mine"}}}, "only its own labels"),
)


def test_account_cannot_touch_another_node(serving: Installation) -> None:
    cluster, agent = serving.cluster, account(serving)
    agent.merge_patch(node_path(NODE), OWN_LABEL)
    assert cluster.get("Node", NODE)["metadata"]["labels"]["gpu-node-agent.io/probe"] == "1"
    own_status = {"status": {"allocatable": {"nvidia.com/gpu": "2"}}}
    agent.merge_patch(node_path(NODE, "/status"), own_status)
    # Its one taint it may set and remove, between those of others.
    foreign, ours = ({"key": key, "effect": EFFECT} for key in ("example.com/a", TAINT))
    cluster.api.merge_patch(node_path(NODE), {"spec": {"taints": [foreign]}})
    agent.merge_patch(node_path(NODE), {"spec": {"taints": [foreign, ours]}})
    with pytest.raises(ApiError, match="may not change a node's spec"):
        agent.merge_patch(node_path(NODE), {"spec": {"taints": [ours]}})
    agent.merge_patch(node_path(NODE), {"spec": {"taints": [foreign]}})
    assert cluster.get("Node", NODE)["spec"]["taints"] == [foreign]
    cluster.api.merge_patch(node_path(NODE), {"spec": {"taints": None}})
    for name, part, patch, words in FOREIGN:
        with pytest.raises(ApiError) as refusal:
            agent.merge_patch(node_path(name, part), patch)
        assert words in str(refusal.value), (name, patch)
    with pytest.raises(ApiError, match="may change that node only"):
        account(serving, bound=False).merge_patch(node_path(NODE), OWN_LABEL)


def test_account_annotates_pods_of_its_node_only(serving: Installation) -> None:
    cluster, agent = serving.cluster, account(serving)
    cluster.apply(manifests.pod("here"))
    cluster.wait_pod("here")
    cluster.apply(manifests.pod("elsewhere", nodeName=OTHER))
    choice = {"metadata": {"annotations": {"tencent.com/predicate-gpu-idx-0": "3"}}}
    pods = "/api/v1/namespaces/default/pods"

    agent.merge_patch(f"{pods}/here", choice)
    with pytest.raises(ApiError, match="pods of that node only"):
        agent.merge_patch(f"{pods}/elsewhere", choice)
    foreign: tuple[dict[str, Any], ...] = (
        {"metadata": {"labels": {"app": "mine"}}},
        {"metadata": {"annotations": {"example.com/a": "b"}}},
        {"spec": {"activeDeadlineSeconds": 1000}},
    )
    for patch in foreign:
        with pytest.raises(ApiError, match="only the annotations of a pod"):
            agent.merge_patch(f"{pods}/here", patch)


def event(about: Mapping[str, str], *, of: str = NODE, by: str = "gpu-node-agent") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": "told-"},
        "involvedObject": {"apiVersion": "v1", **about},
        "reason": "Told",
        "message": "...",
        "source": {"component": by, "host": of},
        "reportingComponent": by,
        "reportingInstance": of,
    }


def test_account_writes_events_in_its_own_name_only(serving: Installation) -> None:
    agent, admin = account(serving), serving.cluster.api
    own, pod = {"kind": "Node", "name": NODE}, {"kind": "Pod", "name": "x", "namespace": "kube-system"}
    events, system = "/api/v1/namespaces/default/events", "/api/v1/namespaces/kube-system/events"
    mine = agent.request("POST", events, event(own))["metadata"]["name"]
    agent.merge_patch(f"{events}/{mine}", {"count": 2})
    agent.request("POST", system, event(pod))
    for path, foreign, words in (
        (events, event(own, of=OTHER), "in its own name only"),
        (system, event(pod, by="kubelet"), "in its own name only"),
        (events, event({"kind": "Node", "name": OTHER}), "about that node and about pods only"),
        (system, event({**pod, "kind": "Secret"}), "about that node and about pods only"),
    ):
        with pytest.raises(ApiError, match=words):
            agent.request("POST", path, foreign)
    others = admin.request("POST", system, event(pod, by="kubelet"))["metadata"]["name"]
    with pytest.raises(ApiError, match="in its own name only"):
        agent.merge_patch(f"{system}/{others}", {"message": "all is well"})
    taken_over = event(pod)
    del taken_over["metadata"]
    with pytest.raises(ApiError, match="in its own name only"):
        agent.merge_patch(f"{system}/{others}", taken_over)


def test_account_can_do_nothing_else(serving: Installation) -> None:
    agent = account(serving)
    default = "/api/v1/namespaces/default"
    for method, path, body in (
        ("GET", f"{default}/secrets", None),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps", None),
        ("POST", f"{default}/pods", manifests.pod("mine")),
        ("DELETE", f"{default}/pods/x", None),
        ("PATCH", f"{default}/pods/x/status", {}),
        ("PATCH", f"{default}/pods/x/ephemeralcontainers", {}),
        ("POST", f"{default}/pods/x/binding", {}),
        ("POST", f"{default}/pods/x/eviction", {}),
        ("POST", f"{default}/pods/x/exec", None),
        ("GET", f"/api/v1/nodes/{NODE}/proxy/pods", None),
        ("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node3"}}),
        ("DELETE", f"/api/v1/nodes/{OTHER}", None),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{RELEASE}/token", {}),
        ("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles", None),
    ):
        with pytest.raises(ApiError) as refusal:
            agent.request(method, path, body, content_type="application/merge-patch+json")
        assert refusal.value.status == 403, (method, path, str(refusal.value))


def test_choices_are_written_by_our_accounts_alone(serving: Installation) -> None:
    cluster = serving.cluster
    chosen = manifests.pod("chosen")
    chosen["metadata"]["annotations"] = {"tencent.com/predicate-gpu-idx-0": "0"}
    with pytest.raises(ApiError, match="leave them out of the pod"):
        cluster.apply(chosen)

    cluster.apply(manifests.pod("plain"))
    cluster.wait_pod("plain")
    path = cluster.api.path("v1", "Pod", "default", "plain")
    with pytest.raises(ApiError, match="leave them out of the pod"):
        cluster.api.merge_patch(path, {"metadata": {"annotations": {"tencent.com/gpu-assigned": "true"}}})
    with pytest.raises(ApiError, match="leave them out of the pod"):
        cluster.api.merge_patch(
            f"{path}/status", {"metadata": {"annotations": {"tencent.com/gpu-assigned": "true"}}}
        )
    cluster.api.merge_patch(path, {"metadata": {"annotations": {"example.com/mine": "1"}}})


def test_choices_may_be_written_by_accounts_that_are_named(serving: Installation) -> None:
    """Another scheduler by `policies.choicesAllowed`; the chart's own extender without being named."""
    cluster = serving.cluster
    for name in ("chooser", "nobody"):
        cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    powers = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "choosers"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [
            {"kind": "ServiceAccount", "name": name, "namespace": "default"} for name in ("chooser", "nobody")
        ],
    }
    cluster.apply(powers)
    allowed = "policies.choicesAllowed={system:serviceaccount:default:chooser}"
    # Its pods would not reach the API server of this cluster; its account is what counts.
    extender = ("--set=extender.enabled=true", "--set-string=extender.nodeSelector.none=true")
    serving.helm("upgrade", RELEASE, str(helm.CHART), "--reuse-values", f"--set={allowed}", *extender)
    chooser, nobody = (acting_as(cluster, "default", name) for name in ("chooser", "nobody"))
    choice = {"tencent.com/predicate-gpu-idx-0": "0", "tencent.com/gpu-assigned": "true"}
    chosen = manifests.pod("chosen", nodeName=OTHER)
    chosen["metadata"]["annotations"] = choice

    def taken_up() -> None:
        try:
            chooser.apply(chosen)
        except ApiError as error:
            raise NotYet(str(error)) from error

    eventually(taken_up, timeout=20, what="the changed policy is in force")
    again = manifests.pod("again", nodeName=OTHER)
    again["metadata"]["annotations"] = choice
    with pytest.raises(ApiError, match="leave them out of the pod"):
        nobody.apply(again)

    cluster.apply(manifests.pod("waiting", schedulerName="none"))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "waiting", "annotations": choice},
        "target": {"apiVersion": "v1", "kind": "Node", "name": OTHER},
    }
    pods = "/api/v1/namespaces/default/pods"
    for path in (f"{pods}/waiting/binding", "/api/v1/namespaces/default/bindings"):
        with pytest.raises(ApiError, match="leave them out of the pod"):
            nobody.request("POST", path, binding)
    acting_as(cluster, NAMESPACE, f"{RELEASE}-extender").request("POST", f"{pods}/waiting/binding", binding)
    bound = cluster.get("Pod", "waiting")
    assert bound["spec"]["nodeName"] == OTHER
    assert choice.items() <= bound["metadata"]["annotations"].items()


def limits(**more: str) -> dict[str, str]:
    names = {"vcore": "tencent.com/vcuda-core", "vmemory": "tencent.com/vcuda-memory"}
    names |= {"mcore": "nvidia.com/mps-core", "mmemory": "nvidia.com/mps-memory", "gpu": "nvidia.com/gpu"}
    return {names[key]: value for key, value in more.items()}


IMPOSSIBLE = {
    "core without memory": (limits(vcore="20"), "without tencent.com/vcuda-memory: add"),
    "150 cores": (limits(vcore="150", vmemory="8"), "must be a multiple of 100"),
    "1010 cores": (limits(vcore="1010", vmemory="8"), "must be a multiple of 100"),
    "more of MPS than a GPU": (limits(mcore="200", mmemory="4"), "a share lies on one GPU"),
    "MPS core alone": (limits(mcore="20"), "add nvidia.com/mps-memory"),
    "MPS memory alone": (limits(mmemory="2"), "add nvidia.com/mps-core"),
    "two modes": (limits(gpu="1", vcore="20", vmemory="8"), "GPUs in two modes"),
    "two kinds of shares": (limits(mcore="10", mmemory="1", vcore="20", vmemory="8"), "GPUs in two modes"),
}
POSSIBLE: tuple[dict[str, str], ...] = (
    limits(gpu="2"),
    limits(vcore="20", vmemory="8"),
    limits(vcore="200"),
    limits(vcore="1k"),
    limits(vmemory="8"),
    limits(mcore="100", mmemory="4"),
    {},
)


def workload(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": name, "labels": {"app": name}}
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec}
    if kind == "Deployment":
        outer = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": template}
        return {"apiVersion": "apps/v1", "kind": kind, "metadata": meta, "spec": outer}
    if kind == "Job":
        spec = {"suspend": True, "template": template}
        return {"apiVersion": "batch/v1", "kind": kind, "metadata": meta, "spec": spec}
    spec = {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": {"spec": {"template": template}}}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": meta, "spec": spec}


def created(cluster: Cluster, manifest: dict[str, Any]) -> None:
    """Ask the API server whether it would take the object; nothing is stored."""
    path = cluster.api.path(manifest["apiVersion"], manifest["kind"], "default")
    cluster.api.request("POST", f"{path}?dryRun=All", manifest)


def test_impossible_requests_are_refused_at_creation(serving: Installation) -> None:
    cluster = serving.cluster

    def spec(kind: str, asked: dict[str, str], init: bool = False) -> dict[str, Any]:
        plain, asking = manifests.container("plain"), manifests.container("asking", limits=asked)
        restart = "Always" if kind == "Deployment" else "Never"
        inits = [asking] if init else []
        found: dict[str, Any] = manifests.pod(
            "x", plain, *([] if init else [asking]), init=inits, restart_policy=restart
        )["spec"]
        return found

    for kind in ("Pod", "Deployment", "Job", "CronJob"):
        for what, (asked, words) in IMPOSSIBLE.items():
            with pytest.raises(ApiError) as refusal:
                created(cluster, workload(kind, "impossible", spec(kind, asked)))
            assert refusal.value.status == 422, what
            told = str(refusal.value)
            assert "container asking asks for" in told, f"{kind}, {what}: {told}"
            assert words in told, f"{kind}, {what}: {told}"
        for asked in POSSIBLE:
            created(cluster, workload(kind, "possible", spec(kind, asked)))
    with pytest.raises(ApiError, match="container asking"):
        created(cluster, workload("Pod", "impossible", spec("Pod", limits(vcore="20"), init=True)))


def test_policies_fit_the_types_they_are_about(serving: Installation) -> None:
    cluster = serving.cluster
    version, kind = "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy"

    def warnings() -> list[str]:
        found = []
        for policy in cluster.find_all(kind, namespace=None, api_version=version):
            status = policy.get("status", {})
            if status.get("observedGeneration") != policy["metadata"]["generation"]:
                raise NotYet(f"{policy['metadata']['name']} was not looked at")
            found += [
                each["warning"] for each in status.get("typeChecking", {}).get("expressionWarnings", [])
            ]
        return found

    assert eventually(warnings, timeout=30, what="types of all policies checked") == []
