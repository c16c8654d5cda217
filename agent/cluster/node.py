"""The own Node object: what it says, and the parts of it that the agent writes."""

import contextlib
from collections.abc import Mapping

import msgspec

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.cluster.reflector import Reflector
from agent.model.pod import Metadata

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
    data = await api.get("/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"})
    try:
        found = msgspec.json.decode(data, type=NodeList).items
    except msgspec.DecodeError as error:
        raise ApiError(f"node {name} cannot be understood: {error}") from error
    return found[0] if found else None


class NodeObject:
    """Watches one node and patches it. No other agent writes the same fields."""

    def __init__(self, api: KubeApi, name: str) -> None:
        self._api = api
        self.name = name
        self._path = f"/api/v1/nodes/{name}"
        self._written = ""  # the node's version after our last write
        self.reflector = Reflector(
            api, "/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"}, ApiNode, "node"
        )

    @property
    def value(self) -> ApiNode | None:
        return next(iter(self.reflector.items.value.values()), None)

    @property
    def uid(self) -> str | None:
        """The UID of the Node object; None: not known yet."""
        return self.value.metadata.uid if self.value else None

    async def seen(self) -> None:
        """Return once the watch has shown our last write; bound it with a cancel scope."""
        await self.reflector.reached(self._written)

    async def patch_metadata(
        self,
        labels: Mapping[str, str | None] | None = None,
        annotations: Mapping[str, str | None] | None = None,
    ) -> None:
        """Set labels and annotations; None removes one. Raises ApiError."""
        metadata = {"labels": dict(labels or {}), "annotations": dict(annotations or {})}
        body = {"metadata": {k: v for k, v in metadata.items() if v}}
        self._answered(await self._api.merge_patch(self._path, body))

    async def set_taint(self, key: str, effect: str, *, present: bool) -> None:
        """Add or remove one taint, keep the others. Raises ApiError.

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

    async def patch_resources(self, figures: Mapping[str, tuple[int, int]]) -> None:
        """Write capacity and allocatable of resources into the status, as the kubelet will at its next tick.

        Raises ApiError.
        """
        status = {
            "capacity": {name: str(capacity) for name, (capacity, _) in figures.items()},
            "allocatable": {name: str(allocatable) for name, (_, allocatable) in figures.items()},
        }
        self._answered(await self._api.merge_patch(f"{self._path}/status", {"status": status}))

    async def patch_condition(
        self, kind: str, status: str, reason: str, message: str, changed: str, now: str
    ) -> None:
        """Write one condition, keep the others. Times in RFC 3339. Raises ApiError."""
        condition = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": changed,
            "lastHeartbeatTime": now,
        }
        body = {"status": {"conditions": [condition]}}
        self._answered(await self._api.strategic_patch(f"{self._path}/status", body))
