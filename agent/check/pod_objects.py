"""Pods as the API server shows them, as far as `check nodes` and `try` look at them."""

from collections.abc import Iterator

import msgspec


class State(msgspec.Struct, rename="camel"):
    """Why a container waits or has ended."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct):
    """Waiting, ended, or neither: it runs."""

    waiting: State | None = None
    terminated: State | None = None


class ContainerStatus(msgspec.Struct, rename="camel"):
    state: ContainerState = msgspec.field(default_factory=ContainerState)
    last_state: ContainerState = msgspec.field(default_factory=ContainerState)


class Condition(msgspec.Struct):
    type: str
    status: str = ""
    message: str = ""


class Status(msgspec.Struct, rename="camel"):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = msgspec.field(default_factory=list)
    container_statuses: list[ContainerStatus] = msgspec.field(default_factory=list)


class Container(msgspec.Struct):
    name: str
    image: str = ""


class Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[Container] = msgspec.field(default_factory=list)


class Owner(msgspec.Struct):
    uid: str = ""


class Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    owner_references: list[Owner] = msgspec.field(default_factory=list)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class Pod(msgspec.Struct):
    metadata: Metadata
    spec: Spec = msgspec.field(default_factory=Spec)
    status: Status = msgspec.field(default_factory=Status)


class PodList(msgspec.Struct):
    items: list[Pod]


def reasons_of(status: Status) -> str:
    """The reasons that Kubernetes gives, in one line; the phase where it gives none."""
    found = dict.fromkeys(" ".join(text.split()) for text in _reasons(status) if text.strip(": "))
    return "; ".join(found) or status.phase


def _reasons(status: Status) -> Iterator[str]:
    yield f"{status.reason}: {status.message}" if status.reason or status.message else ""
    for condition in status.conditions:
        if condition.type == "PodScheduled" and condition.status != "True":
            yield condition.message
    for container in status.container_statuses:
        for state in (container.state.waiting, container.state.terminated):
            if state:
                yield f"{state.reason}: {state.message}".strip(": ")
