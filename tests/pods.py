"""Pods as the API server shows them, for tests that care for little of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent.model.pod import (
    Container,
    ContainerSpec,
    ContainerStatus,
    Metadata,
    Pod,
    PodSpec,
    PodStatus,
    Requirements,
    Stage,
)

SOME_TIME = "2026-01-01T00:00:00Z"


def a_pod(
    namespace: str,
    name: str,
    containers: Sequence[Container] = (),
    uid: str = "",
    *,
    annotations: Mapping[str, str] | None = None,
    phase: str = "Pending",
    ending: bool = False,
    started: bool = False,
) -> Pod:
    """A pod with these containers; plain init containers and sidecars come first, in their order."""
    early = [_spec_of(each) for each in containers if each.stage is not Stage.APP]
    late = [_spec_of(each) for each in containers if each.stage is Stage.APP]
    metadata = Metadata(
        name,
        namespace,
        uid,
        annotations=dict(annotations or {}),
        deletion_timestamp=SOME_TIME if ending else None,
    )
    status = PodStatus(phase, start_time=SOME_TIME if started else None)
    return Pod(metadata, PodSpec(late, early), status)


def changed(pod: Pod, **traits: Any) -> Pod:
    """The same pod with other traits of `a_pod`."""
    before: dict[str, Any] = {
        "namespace": pod.namespace,
        "name": pod.name,
        "containers": pod.containers,
        "uid": pod.uid,
        "annotations": pod.annotations,
        "phase": pod.status.phase,
        "ending": pod.ending,
        "started": pod.started,
    }
    return a_pod(**{**before, **traits})


def seen(namespace: str, name: str, containers: Mapping[str, str], *, finished: bool = False) -> Pod:
    """A pod that ran; `containers`: names by container ID."""
    statuses = [ContainerStatus(each, f"containerd://{key}") for key, each in containers.items()]
    phase = "Succeeded" if finished else "Running"
    return Pod(Metadata(name, namespace), status=PodStatus(phase, container_statuses=statuses))


def _spec_of(container: Container) -> ContainerSpec:
    limits = {resource: str(count) for resource, count in container.limits.items()}
    policy = "Always" if container.stage is Stage.SIDECAR else None
    return ContainerSpec(container.name, Requirements(limits), policy)
