"""The own Node object: what it says, and the parts of it that the agent writes."""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from agent.cluster.api import ApiError, ApiRefused, KubeApi, now
from agent.cluster.event_recorder import EventRecorder
from agent.cluster.reflector import Reflector
from agent.kit.tasks import Cell
from agent.model.modes import units
from agent.model.pod import Metadata

Amounts = Mapping[str, tuple[int, int]]  # resource -> (capacity, allocatable)

TAINT_TRIES = 5  # others change the node's taints, too
CHANGED_MEANWHILE = (409, 422)  # 422: a JSON patch whose `test` failed


class NodeInfo(msgspec.Struct, rename="camel", frozen=True):
    kubelet_version: str = ""
    container_runtime_version: str = ""


class NodeCondition(msgspec.Struct, rename="camel", frozen=True):
    """One of `status.conditions`, without its heartbeat."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None

    @property
    def says(self) -> tuple[str, str, str]:
        return self.status, self.reason, self.message


class NodeStatus(msgspec.Struct, rename="camel", frozen=True):
    """`status`, as far as it is used; quantities as text."""

    node_info: NodeInfo = NodeInfo()
    capacity: dict[str, str] = msgspec.field(default_factory=dict)
    allocatable: dict[str, str] = msgspec.field(default_factory=dict)
    conditions: list[NodeCondition] = msgspec.field(default_factory=list)


class NodeSpec(msgspec.Struct, frozen=True):
    """`spec`, as far as it is used; taints whole, as they are written back."""

    taints: list[dict[str, str]] = msgspec.field(default_factory=list)


class ApiNode(msgspec.Struct, frozen=True):
    """A node; fields that are not named here are skipped while decoding."""

    metadata: Metadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class NodeList(msgspec.Struct):
    items: list[ApiNode]


async def read_node(api: KubeApi, name: str) -> ApiNode | None:
    """One node now; None: there is none of that name. Raises ApiError."""
    # A list of one: the agent's account may list nodes and needs no right to get them.
    found = await api.read("/api/v1/nodes", NodeList, {"fieldSelector": f"metadata.name={name}"})
    return found.items[0] if found.items else None


class OwnNode:
    """Watches one node and patches it. No other agent writes the same fields.

    Reads answer from the newest copy, which own writes are part of once they are answered. Every write raises
    ApiError.
    """

    def __init__(self, api: KubeApi, name: str) -> None:
        self._api = api
        self.name = name
        self._path = f"/api/v1/nodes/{name}"
        self._written = ""  # the node's version after our last write
        self.events = EventRecorder(api, name)
        self.reflector = Reflector(
            api, "/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"}, ApiNode, "node"
        )

    @property
    def changes(self) -> Cell[Any]:
        """Published whenever the node changed."""
        return self.reflector.items

    @property
    def value(self) -> ApiNode | None:
        return next(iter(self.reflector.items.value.values()), None)

    @property
    def uid(self) -> str | None:
        """The UID of the Node object; None: not known yet."""
        return self.value.metadata.uid if self.value else None

    def labels(self) -> Mapping[str, str] | None:
        """The node's labels; None: not known yet."""
        return self.value.metadata.labels if self.value else None

    def annotations(self) -> Mapping[str, str]:
        return self.value.metadata.annotations if self.value else {}

    def condition(self, kind: str) -> NodeCondition | None:
        """One of the node's conditions; None: it has none of that type, or is not known yet."""
        conditions = self.value.status.conditions if self.value else []
        return next((each for each in conditions if each.type == kind), None)

    def amounts(self, resources: frozenset[str]) -> Amounts | None:
        """Capacity and allocatable in the node's status, 0 where absent; None: not known yet."""
        if self.value is None:
            return None
        capacity, allocatable = self.value.status.capacity, self.value.status.allocatable
        return {name: (_count(capacity.get(name)), _count(allocatable.get(name))) for name in resources}

    def tainted(self, key: str) -> bool | None:
        """Whether the node carries a taint of that key; None: not known yet."""
        return any(each.get("key") == key for each in self.value.spec.taints) if self.value else None

    def event(self, reason: str, message: str, warning: bool) -> None:
        """An event about the node; never waits."""
        self.events.node(reason, message, warning)

    async def seen(self) -> None:
        """Return once the watch has shown our last write; bound it with a cancel scope."""
        await self.reflector.reached(self._written)

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        """Set labels and annotations; None removes one."""
        metadata = {"labels": dict(labels), "annotations": dict(annotations)}
        body = {"metadata": {k: v for k, v in metadata.items() if v}}
        self._answered(await self._api.merge_patch(self._path, body))

    async def write_taint(self, key: str, effect: str, *, present: bool) -> None:
        """Add or remove one taint, keep the others.

        One call where the taints are as we saw them last. A patch replaces them as a whole, so it tests them
        first; a version in place of the test would fail at each heartbeat of the kubelet.
        """
        node = self.value or await self._read()
        for _ in range(TAINT_TRIES):
            before = node.spec.taints
            after = [each for each in before if each.get("key") != key]
            if present:
                after.append({"key": key, "effect": effect})
            operations: list[dict[str, object]] = [
                {"op": "test", "path": "/spec/taints", "value": before or None},
                {"op": "add", "path": "/spec/taints", "value": after},
            ]
            try:
                self._answered(await self._api.json_patch(self._path, operations))
            except ApiRefused as error:
                if error.status not in CHANGED_MEANWHILE:
                    raise
            else:
                return
            node = await self._read()
        raise ApiError(
            f"the taints of node {self.name} changed under each of {TAINT_TRIES} tries to set {key}"
        )

    def _answered(self, data: bytes) -> None:
        """Each answer to a write shows the whole node: what was written is known without the watch."""
        with contextlib.suppress(msgspec.DecodeError):
            node = msgspec.json.decode(data, type=ApiNode)
            self._written = node.metadata.resource_version
            self.reflector.answered(node)

    async def _read(self) -> ApiNode:
        node = await read_node(self._api, self.name)
        if node is None:
            raise ApiError(f"there is no node {self.name}")
        return node

    async def write_amounts(self, figures: Amounts) -> None:
        """Write capacity and allocatable into the status, as the kubelet will at its next tick."""
        status = {
            "capacity": {name: str(capacity) for name, (capacity, _) in figures.items()},
            "allocatable": {name: str(allocatable) for name, (_, allocatable) in figures.items()},
        }
        self._answered(await self._api.merge_patch(f"{self._path}/status", {"status": status}))

    async def write_condition(self, kind: str, status: str, reason: str, message: str, changed: str) -> None:
        """Write one condition, keep the others. `changed`: since when its status is so (RFC 3339)."""
        condition = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": changed,
            "lastHeartbeatTime": now(),
        }
        body = {"status": {"conditions": [condition]}}
        self._answered(await self._api.strategic_patch(f"{self._path}/status", body))


def _count(quantity: str | None) -> int:
    """Units of an extended resource; -1: the quantity cannot be understood."""
    try:
        return units(quantity or "0")
    except ValueError:
        return -1
