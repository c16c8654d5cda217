"""The chart with the extender on: its pods as they come, kube-scheduler as docs/extender.md says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.placement import HINT
from tests.chart import helm
from tests.cluster import manifests
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


class WithExtender(Installation):
    """Whole GPUs and fractions, every pod on the network of pods, and the extender with its defaults."""

    def values(self) -> dict[str, Any]:
        """See Installation."""
        found = super().values()
        config = found.pop("config")
        config = {key: config[key] for key in ("driver", "injection")}
        kept = {key: value for key, value in found.items() if key not in ("hostNetwork", "mps")}
        return {**kept, "config": config, "extender": {"enabled": True}}


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


@pytest.fixture
def installation(parts: Parts, request: pytest.FixtureRequest) -> Iterator[Installation]:
    """A cluster in which every pod reaches the API server and is reached by it; the chart, not installed."""
    running = Cluster(parts, Options(private_network=True, pod_network=True))
    config = {**shipped(running.layout.certificates), "podMaxBackoffSeconds": 2}
    running.options = replace(running.options, scheduler_config=config)
    with with_image(running, request), an_installation(running, WithExtender) as made:
        yield made


def leader(installation: Installation, other_than: str = "") -> str:
    """Name of the pod that leads, once it alone is ready and serves under the Service's name."""
    cluster = installation.cluster

    def leads() -> str:
        pods = [
            each for each in installation.pods("extender") if not each["metadata"].get("deletionTimestamp")
        ]
        ready = [each["metadata"]["name"] for each in pods if _ready(each)]
        lease = cluster.find("Lease", f"{RELEASE}-extender", namespace=NAMESPACE, api_version=LEASES)
        holder = lease["spec"].get("holderIdentity") if lease else None
        if len(pods) != REPLICAS or ready != [holder] or holder == other_than:
            raise NotYet(f"{len(pods)} pods, ready {ready}, lease {holder}: {_logs(installation)}")
        return str(holder)

    return eventually(leads, timeout=60, what="one replica of the extender leads", interval=0.2)


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


def bindings(installation: Installation) -> int:
    """How many pods the leader has bound, by its own count."""
    page = str(installation.cluster.api.request("GET", f"{SERVICE}/metrics"))
    start = 'gpu_agent_extender_requests_total{result="ok",verb="bind"} '
    return sum(round(float(line.removeprefix(start))) for line in page.splitlines() if line.startswith(start))


def test_extender_as_the_chart_installs_it(installation: Installation) -> None:
    cluster = installation.cluster
    assert "config/scheduler/proxied.yaml" in installation.install()
    first = leader(installation)
    installation.label("vgpu")
    installation.ready_agent()
    wait_sold(cluster, *SHARE)

    chosen = {run(installation, "one"), run(installation, "two")}
    assert bindings(installation) == 2
    assert len(chosen) == 1, "the default placement leaves other GPUs whole"

    cluster.delete("Pod", first, namespace=NAMESPACE)
    second = leader(installation, other_than=first)
    assert run(installation, "three") in chosen

    assert troubles(installation) == []
    changed = ("--reset-then-reuse-values", "--set", "extender.config.placement=spread", "--wait")
    installation.helm("upgrade", RELEASE, str(helm.CHART), *changed)
    leader(installation, other_than=second)
    assert run(installation, "four") not in chosen
    assert bindings(installation) == 1
    assert {cluster.phase(name) for name in ("one", "two", "three", "four")} == {"Running"}

    installation.helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    assert_nothing_is_left(installation)
    assert cluster.find_all("Lease", namespace=NAMESPACE, api_version=LEASES) == []
    assert {cluster.phase(name) for name in ("one", "two", "three", "four")} == {"Running"}
