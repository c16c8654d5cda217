"""A node of two GPUs whose agent serves claims (DRA), with the rights that the chart gives it."""

import json
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.api import ApiClient, Object
from tests.cluster.real_rig import RESOURCES, RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.pace import scaled
from tests.scenarios.mps import MpsNode, node_to_be
from tests.scenarios.skeleton import unschedulable

T = TypeVar("T")
PROFILE = "l40s-2"
REQUEST_LABEL = "nvidia-device-enable"
DRIVER = "gpu-node-agent.io"
NAMESPACE = "gpu-agents"
AGENT_POD = "agent"
WAIT_SECONDS = 40.0
OF_THE_DOOR = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "DeviceClass")
POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def claim_of(kind: str, cores: int = 0, gib: int = 0, count: int = 1) -> dict[str, Any]:
    """The spec of a claim of the class `gpu-<kind>`."""
    exactly: dict[str, Any] = {"deviceClassName": f"gpu-{kind}", "count": count}
    if cores:
        exactly["capacity"] = {"requests": {"cores": str(cores), "memory": f"{gib}Gi"}}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def whole(name: str, count: int = 1) -> PodSpec:
    """A pod with whole GPUs."""
    return _claiming(name, claim_of("whole", count=count), "default")


def share(name: str, cores: int, gib: int, namespace: str = "default") -> PodSpec:
    """A pod with one MPS share."""
    return _claiming(name, claim_of("mps", cores, gib), namespace)


def _claiming(name: str, spec: Mapping[str, Any], namespace: str) -> PodSpec:
    claims = (PodClaim("gpu", template=spec),)
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), namespace, claims=claims)


def template(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A template of claims."""
    metadata = {"name": name, "namespace": "default"}
    return {
        "apiVersion": RESOURCES,
        "kind": "ResourceClaimTemplate",
        "metadata": metadata,
        "spec": {"spec": dict(spec)},
    }


def gpu_of(device: str) -> str:
    """The GPU of a device, as its name has it."""
    found = re.fullmatch(r"(gpu-.+)-(?:whole|mps)", device)
    assert found, device
    return found[1]


class ClaimsNode:
    """The node as tests use it; everything blocks."""

    def __init__(self, cluster: Cluster, rig: RealRig, mps: MpsNode, portal: BlockingPortal) -> None:
        self.cluster = cluster
        self.rig = rig
        self.mps = mps
        self._portal = portal
        self.kubeconfig = rig.folder / "agent.kubeconfig"

    def call(self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **named: Any) -> T:
        """An asynchronous method of the rig."""
        done: T = self._portal.call(partial(method, *arguments, **named))
        return done

    # The agent

    def start(self, settings: Mapping[str, object] = MappingProxyType({}), gpus: int = 2) -> None:
        """Start the agent; return once its slices are there."""
        given = {
            **self.call(self.mps.settings),
            "defaultMode": "dra",
            "dra.enabled": True,
            "cluster.kubeconfig": str(self.kubeconfig),
            **settings,
        }
        del given["modeFile"]
        self.call(self.rig.start_agent, given)
        self.published(gpus)

    def start_with_layout(self, name: str, layout: Sequence[Mapping[str, Any]]) -> None:
        """Start the agent with GPUs given to doors; return once claims see theirs."""
        settings = {"defaultMode": name, "layouts": {name: list(layout)}}
        self.start(settings, sum(len(each["gpus"]) for each in layout if each["mode"] == "dra"))

    def label(self, mode: str | None) -> None:
        """Request a mode for the node, or none."""
        self.call(self.rig.set_labels, {REQUEST_LABEL: mode})

    def kill(self) -> None:
        self.call(self.rig.kill_agent)

    def stop(self) -> None:
        self.call(self.rig.stop_agent)

    def logged(self, *events: str) -> list[Mapping[str, Any]]:
        """Lines of the agent's log, oldest first."""
        lines = self.rig.agent_log().read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [line for line in found if line.get("event") in events]

    # Its slices

    def slices(self) -> list[Object]:
        """Those of this node."""
        return [each for each in self.all_slices() if each["spec"]["driver"] == DRIVER]

    def all_slices(self) -> list[Object]:
        """Those of this node, and of other drivers, too."""
        found = self.cluster.find_all("ResourceSlice", namespace=None, api_version=RESOURCES)
        return [each for each in found if each["spec"].get("nodeName") == self.cluster.node]

    def devices(self) -> dict[str, Mapping[str, Any]]:
        """Published devices by name."""
        return {each["name"]: each for item in self.slices() for each in item["spec"].get("devices", ())}

    def published(self, gpus: int = 2) -> None:
        """Wait until so many GPUs may be claimed."""

        def complete() -> None:
            free = {gpu_of(name) for name, each in self.devices().items() if not each.get("taints")}
            if len(free) != gpus:
                raise NotYet(f"{self.slices()}; end of the agent's log:\n{self.rig.agent.log_tail()}")

        eventually(complete, timeout=scaled(WAIT_SECONDS), what=f"{gpus} GPUs are published")

    # Pods

    def create(self, *pods: PodSpec) -> None:
        for pod in pods:
            self.call(self.rig.create_pod, pod)

    def run(self, *pods: PodSpec, seconds: float = WAIT_SECONDS) -> None:
        """Create pods and wait until all run."""
        self.create(*pods)
        self.running(*pods, seconds=seconds)

    def running(self, *pods: PodSpec, seconds: float = WAIT_SECONDS) -> None:
        for pod in pods:
            self.call(self.rig.wait_phase, pod, Phase.RUNNING, seconds)

    def waits(self, pod: PodSpec) -> None:
        """Wait until the scheduler has found no device for a pod."""
        self.call(unschedulable, self.rig, pod, WAIT_SECONDS)

    def delete(self, *pods: PodSpec) -> None:
        for pod in pods:
            self.call(self.rig.ask_to_delete, pod)
        for pod in pods:
            self.call(self.rig.delete_pod, pod, WAIT_SECONDS)

    def device(self, pod: PodSpec) -> str:
        """The one device of a pod, by PodResources."""
        (found,) = self.call(self.rig.claimed, pod, "main")
        return found.device

    def environment(self, pod: PodSpec) -> Mapping[str, str]:
        return self.call(self.rig.container_environment, pod, "main")

    def container(self, pod: PodSpec) -> str:
        """ID of a pod's container: another one after a restart."""
        (status,) = self.cluster.get("Pod", pod.name)["status"]["containerStatuses"]
        return str(status["containerID"])

    def daemons(self) -> Mapping[str, int]:
        """PIDs of MPS daemons by GPU."""
        return self.call(self.mps.pids)

    def until(self, reached: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        def look() -> None:
            if not reached():
                raise NotYet(f"not yet; end of the agent's log:\n{self.rig.agent.log_tail()}")

        eventually(look, timeout=scaled(seconds), what=what)

    def clear(self, daemons: int = 0) -> None:
        """Delete all pods of users; return once no claims are left, nor more MPS daemons than these."""
        for item in self.cluster.find_all("Pod", namespace=None):
            metadata = item["metadata"]
            if metadata["namespace"] != NAMESPACE:
                self.cluster.delete(
                    "Pod",
                    metadata["name"],
                    namespace=metadata["namespace"],
                    grace_seconds=1,
                    timeout=scaled(WAIT_SECONDS),
                )

        def gone() -> bool:
            return not self.cluster.find_all("ResourceClaim", namespace=None, api_version=RESOURCES)

        self.until(gone, "all claims of pods are gone")
        self.until(lambda: len(self.daemons()) <= daemons, "no MPS daemon of a claim is left")


def agent_account(cluster: Cluster) -> tuple[ApiClient, str]:
    """The agent's account as the chart makes it, with its policies; its API, and its token.

    The token is bound to a pod on the node, as that of a DaemonSet's pod is.
    """
    rendered = helm.template(settings=["dra.enabled=true", "mps.enabled=true"], namespace=NAMESPACE)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for item in _of_the_agent(rendered):
        cluster.apply(item)
    pod_of_agent = helm.one([each for each in rendered if each["kind"] == "DaemonSet"], "DaemonSet")
    account = pod_of_agent["spec"]["template"]["spec"]["serviceAccountName"]
    pod = manifests.pod(AGENT_POD, nodeName=cluster.node, serviceAccountName=account)
    pod["metadata"]["namespace"] = NAMESPACE
    uid = cluster.apply(pod)["metadata"]["uid"]
    cluster.wait_pod(AGENT_POD, namespace=NAMESPACE)
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [],
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": AGENT_POD, "uid": uid},
        },
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
    token = cluster.api.request("POST", path, request)["status"]["token"]
    return cluster.client(token), token


def remove_account(cluster: Cluster) -> None:
    """Remove all that `agent_account` made."""
    rendered = helm.template(settings=["dra.enabled=true", "mps.enabled=true"], namespace=NAMESPACE)
    cluster.delete("Pod", AGENT_POD, namespace=NAMESPACE, grace_seconds=1)
    for item in reversed(_of_the_agent(rendered)):
        metadata = item["metadata"]
        cluster.delete(
            item["kind"],
            metadata["name"],
            namespace=metadata.get("namespace", "default"),
            api_version=item["apiVersion"],
        )


def _of_the_agent(rendered: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without objects of hooks and of people."""
    return [
        each
        for each in rendered
        if each["kind"] in (*OF_THE_DOOR, *POLICIES)
        and not re.search(r"-cleanup|-gpu-(viewer|operator)$", each["metadata"]["name"])
    ]


def _write_kubeconfig(cluster: Cluster, token: str, path: Path) -> None:
    authority = str(cluster.layout.certificates / "ca.crt")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": cluster.server, "certificate-authority": authority}}
        ],
        "users": [{"name": "agent", "user": {"token": token}}],
        "contexts": [{"name": "agent", "context": {"cluster": "c", "user": "agent"}}],
        "current-context": "agent",
    }
    path.write_text(json.dumps(config))


@contextmanager
def claims_node(cluster: Cluster) -> Iterator[tuple[ClaimsNode, ApiClient]]:
    """The node with its agent running; and the API server as the agent's account sees it."""
    with start_blocking_portal() as portal:
        client, token = agent_account(cluster)
        try:
            with (
                portal.wrap_async_context_manager(real_rig(cluster, PROFILE)) as rig,
                portal.wrap_async_context_manager(node_to_be(rig)) as mps,
            ):
                node = ClaimsNode(cluster, rig, mps, portal)
                _write_kubeconfig(cluster, token, node.kubeconfig)
                node.start()
                try:
                    yield node, client
                finally:
                    node.clear()
        finally:
            remove_account(cluster)
