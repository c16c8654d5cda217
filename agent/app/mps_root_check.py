"""Whether containers with MPS shares may run as root, by the pods' security contexts."""

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from agent.model.demand import MPS

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache

USER_UNKNOWN = "its user is not known without the Kubernetes API"


class RootCheck:
    """See agent.mps.plugin.RootCheck."""

    def __init__(self, pods: "PodCache | None") -> None:
        """`pods`: those of the node; None: there is no way to the Kubernetes API."""
        self._pods = pods

    def named(self, namespace: str, pod: str, container: str) -> str | None:
        """See agent.mps.plugin.RootCheck.

        The kubelet hands an init container's units to an app container, and names that one alone: any
        container of the pod that asks for cores may be the one that starts.
        """
        if self._pods is None:
            return USER_UNKNOWN
        found = self._pods.find(namespace, pod)
        if found is None:
            return "its specification is not known yet"
        spec = found.spec
        others = [
            each.name
            for each in (*spec.init_containers, *spec.containers)
            if MPS.core in each.resources.limits and each.name != container
        ]
        if why := found.may_run_as_root(container):
            return why
        for name in others:
            if why := found.may_run_as_root(name):
                return f"container {name} of the pod, whose cores it may have: {why}"
        return None

    def unnamed(self, cores: int, known: AbstractSet[tuple[str, str, str]]) -> str | None:
        if self._pods is None:
            return USER_UNKNOWN
        suspects = [
            (pod, container.name)
            for pod in self._pods.pods().values()
            if not pod.finished
            for container in (*pod.spec.init_containers, *pod.spec.containers)
            if container.resources.limits.get(MPS.core) == str(cores)
            and (pod.metadata.namespace, pod.metadata.name, container.name) not in known
        ]
        for pod, name in suspects:
            if why := pod.may_run_as_root(name):
                where = f"{pod.metadata.namespace}/{pod.metadata.name}"
                return f"container {name} of {where} may run as root ({why})"
        return None if suspects else "no container that asks for so many is known"
