"""Refusals of the API server: to the agent's account, to users who write choices, to impossible pods."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.cleanup.request import REPORT, REQUEST
from agent.node.capacity import EFFECT, TAINT
from tests.chart import helm
from tests.chart.documents import commands
from tests.cluster import manifests, scraping
from tests.cluster.accounts import acting_as, in_force, service_account
from tests.cluster.api import ApiClient, ApiError
from tests.cluster.foreign_writes import FOREIGN, OF_A_NODE, OF_THE_RECORD, OTHER, OWN_LABEL
from tests.cluster.gpu_requests import IMPOSSIBLE, POSSIBLE, created, limits, workload
from tests.cluster.install_fixtures import an_installation, audit, delete_pods, open_cluster
from tests.cluster.installation import MODE_LABEL, NAMESPACE, RELEASE, Installation
from tests.cluster.rig import NODE, REPOSITORY, Cluster
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "open_cluster"]


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


def node_path(name: str, part: str = "") -> str:
    return f"/api/v1/nodes/{name}{part}"


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
    chooser, nobody = (
        service_account(cluster, "default", name, "cluster-admin") for name in ("chooser", "nobody")
    )
    allowed = "policies.choicesAllowed={system:serviceaccount:default:chooser}"
    # Its pods would not reach the API server of this cluster; its account is what counts.
    extender = (
        "--set=extender.enabled=true",
        "--set=extender.config.http.verbs=true",
        "--set-string=extender.nodeSelector.none=true",
    )
    serving.helm("upgrade", RELEASE, str(helm.CHART), "--reuse-values", f"--set={allowed}", *extender)
    choice = {"tencent.com/predicate-gpu-idx-0": "0", "tencent.com/gpu-assigned": "true"}
    chosen = manifests.pod("chosen", nodeName=OTHER)
    chosen["metadata"]["annotations"] = choice
    in_force(lambda: chooser.apply(chosen))
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


SUITE = ("gpu-manager", "gpu-admission")
CHOSEN = {"metadata": {"annotations": {"tencent.com/predicate-gpu-idx-0": "1"}}}
GRANTED = {"metadata": {"annotations": {"tencent.com/gpu-assigned": "true"}}}


def flags(words: list[str]) -> list[str]:
    """Values that a documented helm command sets, but for the image's."""
    pairs = [(word, value) for word, value in pairwise(words) if word.startswith("--set")]
    return [f"{word}={value}" for word, value in pairs if not value.startswith("image.")]


def label(cluster: Cluster, node: str, key: str, value: str | None) -> None:
    cluster.api.merge_patch(node_path(node), {"metadata": {"labels": {key: value}}})


def agents_wanted(serving: Installation, count: int) -> None:
    """Raises NotYet while agents are wanted on more or fewer nodes."""
    found = serving.cluster.get("DaemonSet", RELEASE, namespace=NAMESPACE, api_version="apps/v1")
    seen = found["status"].get("observedGeneration") == found["metadata"]["generation"]
    wanted = found["status"]["desiredNumberScheduled"]
    if not seen or wanted != count or len(serving.pods("agent")) != count:
        raise NotYet(f"agents are wanted on {wanted} nodes (newest state: {seen})")


HOOK = f"{RELEASE}-cleanup"


def test_the_hook_writes_two_annotations_and_one_label(serving: Installation) -> None:
    """Its account is made by helm for an uninstall; its policies are there all the time."""
    cluster = serving.cluster
    hook = service_account(cluster, NAMESPACE, HOOK, "cluster-admin")
    hook.merge_patch(node_path(NODE), {"metadata": {"annotations": {REQUEST: "{}", REPORT: "{}"}}})
    hook.merge_patch(node_path(NODE), {"metadata": {"annotations": {REQUEST: None, REPORT: None}}})
    for patch in OF_A_NODE:
        with pytest.raises(ApiError, match="hook may change only the annotations"):
            hook.merge_patch(node_path(NODE), patch)

    records = cluster.find_all("Secret", namespace=NAMESPACE, labelSelector="owner=helm")
    record = cluster.api.path("v1", "Secret", NAMESPACE, records[-1]["metadata"]["name"])
    status = records[-1]["metadata"]["labels"]["status"]
    hook.merge_patch(record, {"metadata": {"labels": {"status": "deployed"}}})
    hook.merge_patch(record, {"metadata": {"labels": {"status": status}}})
    for patch in OF_THE_RECORD:
        with pytest.raises(ApiError, match="hook may change only the label status"):
            hook.merge_patch(record, patch)


def test_migration_leaves_the_running_suite_alone(serving: Installation) -> None:
    """gpu-manager and gpu-admission go on writing, and no agent comes to nodes that were not moved."""
    cluster = serving.cluster
    # Of the ways in the guide the one from gpu-manager.
    documented = [flags(words) for words in commands(REPOSITORY / "docs" / "migration.md")]
    (install,) = [each for each in documented if any(":gpu-admission" in flag for flag in each)]
    (end,) = [each for each in documented if any("choicesAllowed=[]" in flag for flag in each)]
    manager, admission = (service_account(cluster, "kube-system", name, "cluster-admin") for name in SUITE)
    cluster.apply(manifests.pod("held", nodeName=OTHER))
    cluster.apply(manifests.pod("waiting", schedulerName="none"))
    held, waiting = (cluster.api.path("v1", "Pod", "default", name) for name in ("held", "waiting"))
    with pytest.raises(ApiError, match="leave them out of the pod"):
        manager.merge_patch(held, GRANTED)

    label(cluster, OTHER, MODE_LABEL, "enable")
    serving.helm("upgrade", RELEASE, str(helm.CHART), "--reuse-values", *install)
    try:
        in_force(lambda: admission.merge_patch(waiting, CHOSEN))
        manager.merge_patch(held, GRANTED)
        manager.merge_patch(f"{held}/status", CHOSEN)
        eventually(lambda: agents_wanted(serving, 0), timeout=40, what="no agent where nothing was moved")
        label(cluster, NODE, "gpu-agent", "moved")
        assert serving.ready_agent()["spec"]["nodeName"] == NODE
    finally:
        label(cluster, OTHER, MODE_LABEL, None)
        serving.helm("upgrade", RELEASE, str(helm.CHART), "--reset-then-reuse-values", *end)
        label(cluster, NODE, "gpu-agent", None)

    values = count()  # what does not change is not refused

    def refused() -> None:
        changed = {"metadata": {"annotations": {"tencent.com/gpu-assigned": str(next(values))}}}
        with suppress(ApiError):
            manager.merge_patch(held, changed)
            raise NotYet("still allowed")

    eventually(refused, timeout=20, what="the policy is in force again")
    eventually(lambda: agents_wanted(serving, 1), timeout=40, what="the agent is where it was")
    serving.ready_agent()


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


def test_metrics_need_a_right(serving: Installation, tmp_path: Path) -> None:
    """By `metrics.access`: the real API server knows the tokens, and says who may get /metrics."""
    cluster, plain = serving.cluster, "http://127.0.0.1:9446"

    def shown(url: str, authority: Path | None = None, bearer: str = "") -> None:
        """The agent may be new; RBAC is taken up a moment after it was written."""

        def admitted() -> None:
            status, text = scraping.scrape(cluster, url, authority, bearer)
            if status != 200:
                raise NotYet(f"{status} {text} {serving.agent_log()}")
            assert "gpu_agent_ready" in text

        eventually(admitted, timeout=60, what=f"{url} shows the metrics")

    shown(f"{plain}/metrics")  # to everybody, by default
    authority = scraping.certificate(cluster, tmp_path)
    # A name of its own: an earlier test gives the account `nobody` rights.
    scraper, outsider = (scraping.token(cluster, name) for name in ("scraper", "outsider"))
    access = f"--set=metrics.access.secret={scraping.SECRET}"
    readers = "--set=metrics.access.readers={default:scraper}"
    # An earlier test leaves an extender whose pods fit on no node: --wait would wait for it.
    alone = "--set=extender.enabled=false"
    serving.helm("upgrade", RELEASE, str(helm.CHART), "--reuse-values", alone, access, readers, "--wait")
    try:
        url = f"https://127.0.0.1:{scraping.PORT}/metrics"
        shown(url, authority, scraper)
        status, text = scraping.scrape(cluster, url, authority, outsider)
        assert (status, "system:serviceaccount:default:outsider may not get /metrics" in text) == (403, True)
        for bearer in ("", "forged", scraper[:-4] + "AAAA"):
            assert scraping.scrape(cluster, url, authority, bearer)[0] == 401
        status, text = scraping.scrape(cluster, f"{plain}/metrics")
        assert (status, "over HTTPS on port 9447" in text, "gpu_agent" in text) == (403, True, False)

        def ready() -> None:
            status, text = scraping.scrape(cluster, f"{plain}/readyz")
            if status != 200:
                raise NotYet(f"{status} {text}")

        # Without a token; the agent serves /metrics before it has registered its resources.
        eventually(ready, timeout=60, what="/readyz answers 200")
    finally:
        off = ("--set=metrics.access.secret=", "--set-json=metrics.access.readers=[]")
        serving.helm("upgrade", RELEASE, str(helm.CHART), "--reuse-values", *off, "--wait")
