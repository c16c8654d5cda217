"""Work of tests with objects of a cluster: create, look, wait, run commands in containers."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from tests.cluster.api import ApiClient, ApiError, Manifest, Object
from tests.cluster.waiting import NotYet, RigError, eventually

NOT_FOUND = 404
FINAL_PHASES = ("Succeeded", "Failed")


class Objects(ABC):
    """Mixin of the cluster; namespaces default to `default`, kinds of other groups name their API version."""

    node: str

    @property
    @abstractmethod
    def api(self) -> ApiClient: ...

    @abstractmethod
    def kubectl(self, *arguments: str, timeout: float = 30, stdin: str | None = None) -> str: ...

    def apply(self, manifest: Manifest) -> Object:
        """Create or update one object; return what was stored."""
        return self.api.apply(manifest)

    def get(self, kind: str, name: str, *, namespace: str = "default", api_version: str = "v1") -> Object:
        """The object; raises ApiError 404 when there is none."""
        return self.api.get(self.api.path(api_version, kind, namespace, name))

    def find(
        self, kind: str, name: str, *, namespace: str = "default", api_version: str = "v1"
    ) -> Object | None:
        """The object, or None when there is none."""
        try:
            return self.get(kind, name, namespace=namespace, api_version=api_version)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def find_all(
        self, kind: str, *, namespace: str | None = "default", api_version: str = "v1", **query: str
    ) -> list[Object]:
        """All objects of a kind; `namespace=None`: of all namespaces; `query`: the API's (labelSelector)."""
        items: list[Object] = self.api.get(self.api.path(api_version, kind, namespace), **query)["items"]
        return items

    def delete(
        self,
        kind: str,
        name: str,
        *,
        namespace: str = "default",
        api_version: str = "v1",
        grace_seconds: int | None = None,
        timeout: float = 30,
    ) -> None:
        """Delete an object and wait until it is gone; nothing happens when there is none.

        Pods get `grace_seconds` to end (their own choice where it is None). A pod gone from the API has ended
        on its node, since the kubelet removes it last; not so with 0, where the API forgets it at once.
        """
        path = self.api.path(api_version, kind, namespace, name)
        try:
            self.api.delete(path, grace_seconds=grace_seconds)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return

        def gone() -> None:
            if self.find(kind, name, namespace=namespace, api_version=api_version) is not None:
                raise NotYet("it is still there")

        eventually(gone, timeout=timeout, what=f"{kind} {namespace}/{name} deleted")

    def phase(self, pod: str, *, namespace: str = "default") -> str:
        """Phase of a pod: Pending, Running, Succeeded, Failed."""
        return str(self.get("Pod", pod, namespace=namespace)["status"]["phase"])

    def wait_pod(
        self, name: str, phase: str = "Running", *, namespace: str = "default", timeout: float = 30
    ) -> Object:
        """Wait for a phase of a pod, for Running also for all containers being ready; return the pod.

        Raises RigError at once when the pod has ended in another phase.
        """

        def reached() -> Object:
            pod = self.get("Pod", name, namespace=namespace)
            status = pod["status"]
            if status["phase"] == phase and (phase != "Running" or _condition(pod, "Ready")):
                return pod
            seen = json.dumps({key: status.get(key) for key in ("phase", "reason", "message")})
            if status["phase"] in FINAL_PHASES:
                raise RigError(f"pod {name} ended: {seen} instead of {phase}")
            events = partial(self.events, name, namespace=namespace)
            raise NotYet(lambda: f"{seen}; {'; '.join(events()) or 'no events'}")

        return eventually(reached, timeout=timeout, what=f"pod {namespace}/{name} {phase}")

    def events(self, name: str, *, namespace: str = "default") -> list[str]:
        """Events about an object, as `reason: message`, oldest first."""
        selector = f"involvedObject.name={name}"
        items = self.find_all("Event", namespace=namespace, fieldSelector=selector)
        items.sort(key=lambda item: str(item["metadata"]["creationTimestamp"]))
        return [f"{item['reason']}: {item.get('message', '')}" for item in items]

    def wait_node_ready(self, *, timeout: float = 30) -> None:
        """Wait until the node's kubelet says that it is ready."""

        def ready() -> None:
            found = self.find("Node", self.node)
            if found is None:
                raise NotYet("the node is not registered")
            if not _condition(found, "Ready"):
                conditions = [item for item in found["status"]["conditions"] if item["type"] == "Ready"]
                raise NotYet(json.dumps(conditions))

        eventually(ready, timeout=timeout, what=f"node {self.node} ready")

    def allocatable(self, resource: str) -> int | None:
        """How much of an extended resource the node offers; None while the node does not know its name."""
        value = self.get("Node", self.node)["status"].get("allocatable", {}).get(resource)
        return None if value is None else int(value)

    def wait_allocatable(self, resource: str, amount: int, *, timeout: float = 30) -> None:
        """Wait until the node offers exactly this much of an extended resource."""

        def reached() -> None:
            seen = self.allocatable(resource)
            if seen != amount:
                raise NotYet(f"{seen}")

        eventually(reached, timeout=timeout, what=f"allocatable {resource} = {amount} on {self.node}")

    def exec(
        self,
        pod: str,
        container: str,
        argv: Sequence[str],
        *,
        namespace: str = "default",
        timeout: float = 30,
    ) -> str:
        """Run a command in a container; return its standard output. Raises RigError when it fails."""
        where = ("--namespace", namespace, pod, "--container", container)
        return self.kubectl("exec", *where, "--", *argv, timeout=timeout)

    def logs(self, pod: str, container: str, *, namespace: str = "default") -> str:
        """The output of a container so far."""
        path = f"{self.api.path('v1', 'Pod', namespace, pod)}/log?container={container}"
        return str(self.api.request("GET", path))


def _condition(item: dict[str, Any], kind: str) -> bool:
    conditions = item["status"].get("conditions", [])
    return any(entry["type"] == kind and entry["status"] == "True" for entry in conditions)
