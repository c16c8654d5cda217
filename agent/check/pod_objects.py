"""Pods as the API server shows them, as far as `check nodes` and `try` look at them."""

from collections.abc import Iterator

import msgspec

from agent.model.pod import Metadata


class ContainerEnd(msgspec.Struct, rename="camel"):
    """Why a container waits or has ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _ContainerState(msgspec.Struct):
    """Waiting, ended, or neither: it runs."""

    waiting: ContainerEnd | None = None
    terminated: ContainerEnd | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)
    last_state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _PodCondition(msgspec.Struct):
    type: str
    status: str = ""
    message: str = ""


class ShownStatus(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[_PodCondition] = msgspec.field(default_factory=list)
    container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)


class _ContainerSpec(msgspec.Struct):
    name: str
    image: str = ""


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_ContainerSpec] = msgspec.field(default_factory=list)


class ShownPod(msgspec.Struct):
    metadata: Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: ShownStatus = msgspec.field(default_factory=ShownStatus)


class ShownPods(msgspec.Struct):
    items: list[ShownPod]


def reasons_of(status: ShownStatus) -> str:
    """The reasons that Kubernetes gives, in one line; the phase where it gives none."""
    found = dict.fromkeys(" ".join(text.split()) for text in _reasons(status) if text.strip(": "))
    return "; ".join(found) or status.phase


def _reasons(status: ShownStatus) -> Iterator[str]:
    yield f"{status.reason}: {status.message}" if status.reason or status.message else ""
    for condition in status.conditions:
        if condition.type == "PodScheduled" and condition.status != "True":
            yield condition.message
    for container in status.container_statuses:
        for state in (container.state.waiting, container.state.terminated):
            if state:
                yield f"{state.reason}: {state.message}".strip(": ")
