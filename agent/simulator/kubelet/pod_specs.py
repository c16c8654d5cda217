"""Pods as the embedded kubelet and the scenario suite know them: small frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """`status.phase` of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def finished(self) -> bool:
        """Whether the pod runs no more, and so holds nothing."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


@dataclass(frozen=True, slots=True)
class PodClaim:
    """A claim of a pod (DRA), by its name in the pod: one that exists, or one made from a spec."""

    name: str
    claim: str = ""
    template: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container; `limits` counts whole units of extended resources."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    # An init container with restartPolicy Always: a sidecar, which runs on beside the app containers.
    restartable: bool = False
    # An app container that ends by itself with exit code 0; else it runs until the pod is deleted.
    exits: bool = False
    # Seconds that a container runs which ends by itself: a plain init container, or one that `exits`.
    seconds: float = 0.0
    claims: tuple[str, ...] = ()  # by their names in the pod


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod. Plain init containers end by themselves with exit code 0.

    `static`: a manifest file on the node, which the kubelet reads by itself; its name ends with the node's.
    """

    name: str
    containers: tuple[ContainerSpec, ...]
    namespace: str = "default"
    init_containers: tuple[ContainerSpec, ...] = ()
    # Preset: the pod goes straight to that node's kubelet and no scheduler checks whether it fits.
    node_name: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = "Never"
    static: bool = False
    host_pid: bool = False
    grace: float = 0.0  # seconds that its processes take to end once it is deleted
    claims: tuple[PodClaim, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)

    def request(self, resource: str) -> int:
        """The scheduler's count: app containers and sidecars together, or the largest step of init."""
        sidecars, peak = 0, 0
        for container in self.init_containers:
            amount = container.limits.get(resource, 0)
            peak = max(peak, sidecars + amount)
            sidecars += amount if container.restartable else 0
        return max(peak, sidecars + sum(each.limits.get(resource, 0) for each in self.containers))

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of all resources that any container asks for, in order of appearance."""
        return tuple(dict.fromkeys(r for c in (*self.init_containers, *self.containers) for r in c.limits))
