"""The chart with the extender on: its pods as they come, kube-scheduler as docs/extender.md says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.extender.lease import LABEL
from agent.model.placement import HINT
from agent.model.pod import WAITING_FOR_GPU
from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.accounts import acting_as
from tests.cluster.api import ApiClient, ApiError
from tests.cluster.build import Parts
from tests.cluster.extender_process import CONFIG
from tests.cluster.install_fixtures import an_installation, with_image
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.options import Options
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import UNTIL_DELETED
from tests.cluster.test_install import assert_nothing_is_left, wait_sold
from tests.cluster.waiting import NotYet, eventually

LEASES = "coordination.k8s.io/v1"
SERVICE = f"/api/v1/namespaces/{NAMESPACE}/services/{RELEASE}-extender:3456/proxy"
SHARE = {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 16}
REPLICAS = 2
REPLACED = ("--reset-then-reuse-values", "--set")
COMPONENT = "app.kubernetes.io/component"


class WithExtender(Installation):
    """Whole GPUs and fractions, every pod on the network of pods, and the extender with its defaults."""

    def values(self) -> dict[str, Any]:
        """See Installation."""
        found = super().values()
        config = found.pop("config")
        config = {key: config[key] for key in ("driver", "injection")}
        kept = {key: value for key, value in found.items() if key not in ("hostNetwork", "mps")}
        return {**kept, "config": config, "extender": {"enabled": True, "config": {"http": {"verbs": True}}}}


def shipped(pki: Path) -> dict[str, Any]:
    """The file that is shipped for kube-scheduler, with the paths and addresses of this cluster."""
    text = (CONFIG / "proxied.yaml").read_text()
    for theirs, ours in {
        "/etc/kubernetes/scheduler.conf": f"{pki}/scheduler.kubeconfig",
        "/etc/kubernetes/pki/apiserver-kubelet-client.": f"{pki}/kubelet-client.",
        "/etc/kubernetes/pki/ca.crt": f"{pki}/ca.crt",
        "https://127.0.0.1:6443/": "https://127.0.0.1:443/",
        "/namespaces/gpu-node-agent/": f"/namespaces/{NAMESPACE}/",
    }.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def installation(parts: Parts, request: pytest.FixtureRequest) -> Iterator[Installation]:
    """A cluster in which every pod reaches the API server and is reached by it; the chart, installed."""
    running = Cluster(parts, Options(private_network=True, pod_network=True))
    config = {**shipped(running.layout.certificates), "podMaxBackoffSeconds": 2}
    running.options = replace(running.options, scheduler_config=config)
    with with_image(running, request), an_installation(running, WithExtender) as made:
        assert "config/scheduler/proxied.yaml" in made.install()  # with --wait
        yield made


def staying(installation: Installation) -> list[dict[str, Any]]:
    """Pods of the extender but those that are being deleted."""
    return [each for each in installation.pods("extender") if not each["metadata"].get("deletionTimestamp")]


def leader(installation: Installation, other_than: str = "") -> str:
    """Name of the pod that leads, once all are ready and it alone is behind the Service."""
    cluster = installation.cluster

    def leads() -> str:
        pods = staying(installation)
        ready = [each["metadata"]["name"] for each in pods if _ready(each)]
        serving = [each["metadata"]["name"] for each in pods if LABEL in each["metadata"]["labels"]]
        lease = cluster.find("Lease", f"{RELEASE}-extender", namespace=NAMESPACE, api_version=LEASES)
        holder = lease["spec"].get("holderIdentity") if lease else None
        if (
            len(ready) != REPLICAS
            or serving != [holder]
            or holder == other_than
            or endpoints(cluster) != serving
        ):
            raise NotYet(f"ready {ready}, label {serving}, lease {holder}: {_logs(installation)}")
        return str(holder)

    return eventually(leads, timeout=60, what="one replica of the extender serves", interval=0.2)


def endpoints(cluster: Cluster) -> list[str]:
    """Pods that the Service of the extender leads to."""
    found = cluster.find("Endpoints", f"{RELEASE}-extender", namespace=NAMESPACE) or {}
    subsets = found.get("subsets") or []
    return [each["targetRef"]["name"] for subset in subsets for each in subset.get("addresses", [])]


def _ready(pod: dict[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def _logs(installation: Installation) -> str:
    found = []
    for pod in installation.pods("extender"):
        name = pod["metadata"]["name"]
        try:
            found.append(installation.cluster.logs(name, "extender", namespace=NAMESPACE)[-700:])
        except Exception as error:  # noqa: BLE001  only for messages of tests that failed anyway
            found.append(str(error))
    return "\n".join(found)


def troubles(installation: Installation) -> list[str]:
    """Errors in the logs of the release's pods."""
    return [
        line
        for component in ("agent", "extender")
        for pod in installation.pods(component)
        for line in installation.cluster.logs(
            pod["metadata"]["name"], component, namespace=NAMESPACE
        ).splitlines()
        if json.loads(line)["level"] in ("error", "critical")
    ]


def run(installation: Installation, name: str) -> str:
    """Run a pod with a share; the GPU that was chosen for it."""
    cluster = installation.cluster
    container = manifests.container("main", ["sh", "-c", UNTIL_DELETED], limits=SHARE)
    cluster.apply(manifests.pod(name, container))
    pod = cluster.wait_pod(name, "Running")
    return str(pod["metadata"]["annotations"][f"{HINT}0"])


def told_why(cluster: Cluster, pod: str) -> str:
    """The sentence of the extender's event on a pod that waits."""

    def told() -> str:
        for event in cluster.find_all("Event"):
            if event["reason"] == WAITING_FOR_GPU and event["involvedObject"]["name"] == pod:
                return str(event["message"])
        raise NotYet("; ".join(cluster.events(pod)))

    return eventually(told, timeout=30, what=f"an event {WAITING_FOR_GPU} on {pod}", interval=0.2)


def bindings(installation: Installation) -> int:
    """How many pods the leader has bound, by its own count."""
    page = str(installation.cluster.api.request("GET", f"{SERVICE}/metrics"))
    start = 'gpu_agent_extender_requests_total{result="ok",verb="bind"} '
    return sum(round(float(line.removeprefix(start))) for line in page.splitlines() if line.startswith(start))


def test_standby_is_ready(installation: Installation) -> None:
    cluster = installation.cluster
    first = leader(installation)
    assert (
        cluster.get("Deployment", f"{RELEASE}-extender", namespace=NAMESPACE, api_version="apps/v1")[
            "status"
        ]["readyReplicas"]
        == REPLICAS
    )  # helm has waited for them

    # One may be evicted at a time, and the Service follows.
    evict(cluster, first)
    second = leader(installation, other_than=first)
    assert "serving" in str(cluster.api.request("GET", f"{SERVICE}/serving"))
    installation.helm(
        "upgrade", RELEASE, str(helm.CHART), *REPLACED, "extender.config.assumeSeconds=20", "--wait"
    )
    third = leader(installation)
    assert third not in (first, second)

    # The account is held to that label of the extender's pods.
    account = acting_as(cluster, NAMESPACE, f"{RELEASE}-extender")
    (standby,) = {pod["metadata"]["name"] for pod in staying(installation)} - {third}
    path = cluster.api.path("v1", "Pod", NAMESPACE, standby)
    account.merge_patch(path, {"metadata": {"labels": {LABEL: "true"}}})
    for changed in ({"labels": {"app": "x"}}, {"annotations": {"a": "b"}}, {"labels": {COMPONENT: None}}):
        with pytest.raises(ApiError, match="may change only the label"):
            account.merge_patch(path, {"metadata": changed})
    other = manifests.pod("other", manifests.container("main", ["sleep", "1"]))
    other["metadata"]["namespace"] = NAMESPACE
    cluster.apply(other)
    path = cluster.api.path("v1", "Pod", NAMESPACE, "other")
    with pytest.raises(ApiError, match="may label its own replicas only"):
        account.merge_patch(path, {"metadata": {"labels": {LABEL: "true"}}})
    cluster.delete("Pod", "other", namespace=NAMESPACE)
    check_events(cluster, account)
    # A label on the wrong replica is taken away.
    assert leader(installation) == third


def check_events(cluster: Cluster, account: ApiClient) -> None:
    """The account writes events about pods, in its own name."""
    events = cluster.api.path("v1", "Event", "default")
    component = f"{RELEASE}-extender"
    pod = {"kind": "Pod", "name": "somebody", "namespace": "default"}
    for about, by, allowed in (
        (pod, component, True),
        (pod, "kubelet", False),
        ({"kind": "Node", "name": cluster.node}, component, False),
    ):
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "made-up.", "namespace": "default"},
            "involvedObject": about,
            "reason": WAITING_FOR_GPU,
            "source": {"component": by},
            "reportingComponent": by,
        }
        if allowed:
            account.request("POST", events, body)
        else:
            with pytest.raises(ApiError, match="events about pods only, and in its own name only"):
                account.request("POST", events, body)


def evict(cluster: Cluster, name: str) -> None:
    """Ask for an eviction, as a drain of its node does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    path = f"{cluster.api.path('v1', 'Pod', NAMESPACE, name)}/eviction"
    eventually(lambda: _allowed(cluster, path, body), timeout=30, what="the eviction is allowed")


def _allowed(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    try:
        cluster.api.request("POST", path, body)
    except ApiError as error:  # the budget's controller has not counted yet
        raise NotYet(str(error)) from error


def test_extender_as_the_chart_installs_it(installation: Installation) -> None:
    cluster = installation.cluster
    first = leader(installation)
    installation.label("vgpu")
    installation.ready_agent()
    wait_sold(cluster, *SHARE)

    # In total the node has this memory, no GPU has: the pod gets an event, by the chart's own account.
    large = manifests.container("main", ["true"], limits={**SHARE, "tencent.com/vcuda-memory": 4000})
    cluster.apply(manifests.pod("large", large))
    assert "even if it were empty; ask for less" in told_why(cluster, "large")
    cluster.delete("Pod", "large")

    chosen = {run(installation, "one"), run(installation, "two")}
    assert bindings(installation) == 2
    assert len(chosen) == 1, "the default placement leaves other GPUs whole"

    cluster.delete("Pod", first, namespace=NAMESPACE)
    second = leader(installation, other_than=first)
    assert run(installation, "three") in chosen

    assert troubles(installation) == []
    installation.helm(
        "upgrade", RELEASE, str(helm.CHART), *REPLACED, "extender.config.placement=spread", "--wait"
    )
    leader(installation, other_than=second)
    assert run(installation, "four") not in chosen
    assert bindings(installation) == 1
    assert {cluster.phase(name) for name in ("one", "two", "three", "four")} == {"Running"}

    installation.helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    assert_nothing_is_left(installation)
    assert cluster.find_all("Lease", namespace=NAMESPACE, api_version=LEASES) == []
    assert {cluster.phase(name) for name in ("one", "two", "three", "four")} == {"Running"}
