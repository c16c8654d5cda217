"""Nodes and pods of the API server, cut down to what the ledger keeps."""

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from agent.extender.fleet import BoundPod, LedgerNode
from agent.extender.free_capacity import HeldUnits, PodClaim
from agent.extender.pod_demand import RESOURCES, PodDemand, chosen_in, pod_demand
from agent.model.modes import PAIRS, BadDeviceId, Mode, parse, units
from agent.model.node_inventory import INVENTORY, BadInventory, decode
from agent.model.placement import ASSIGNED, POLICY, PlacementPolicy
from agent.model.pod import Impossible, Metadata, Pod, PodSpec, PodStatus

log = structlog.get_logger()


class _NodeStatus(msgspec.Struct, frozen=True):
    allocatable: dict[str, str] = msgspec.field(default_factory=dict)


class _Node(msgspec.Struct, frozen=True):
    metadata: Metadata
    status: _NodeStatus = _NodeStatus()


class _Device(msgspec.Struct, frozen=True):
    id: str = msgspec.field(default="", name="resourceID")


class _Devices(msgspec.Struct, frozen=True):
    name: str = ""
    resources: list[_Device] = msgspec.field(default_factory=list)


class _ContainerStatus(msgspec.Struct, rename="camel", frozen=True):
    name: str
    # KEP-4680: what the kubelet's device manager gave the container, by its own records.
    allocated_resources_status: list[_Devices] = msgspec.field(default_factory=list)


class PodCondition(msgspec.Struct, frozen=True):
    """A condition of a pod, without its times."""

    type: str = ""
    status: str = ""
    reason: str = ""


class _PodStatus(msgspec.Struct, rename="camel", frozen=True):
    conditions: list[PodCondition] = msgspec.field(default_factory=list)
    phase: str = "Pending"
    reason: str = ""  # of the phase
    message: str = ""
    container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)
    init_container_statuses: list[_ContainerStatus] = msgspec.field(default_factory=list)


class _SchedulingGroup(msgspec.Struct, rename="camel", frozen=True):
    pod_group_name: str = ""


class _AntiAffinity(msgspec.Struct, frozen=True):
    required: list[msgspec.Raw] = msgspec.field(
        default_factory=list, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class _Affinity(msgspec.Struct, rename="camel", frozen=True):
    pod_anti_affinity: _AntiAffinity | None = None


class _PodSpec(PodSpec, rename="camel", frozen=True):
    affinity: _Affinity | None = None
    scheduling_group: _SchedulingGroup | None = None  # of kube-scheduler's own gangs, since 1.36
    # While there are any, it is not scheduled.
    scheduling_gates: list[Any] = msgspec.field(default_factory=list)


class WatchedPod(msgspec.Struct, frozen=True):
    """A pod, with the part of its status that lists devices."""

    metadata: Metadata
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


_nodes, _pods = msgspec.json.Decoder(_Node), msgspec.json.Decoder(WatchedPod)


def read_node(raw: bytes | msgspec.Raw) -> tuple[Metadata, LedgerNode]:
    """A Node object's JSON. Raises msgspec.DecodeError."""
    node = _nodes.decode(raw)
    name, text = node.metadata.name, node.metadata.annotations.get(INVENTORY)
    totals = _totals(node.status.allocatable)
    try:
        return node.metadata, LedgerNode(name, decode(text) if text else None, totals)
    except BadInventory as error:
        log.warning("inventory_unusable", node=name, problem=str(error))
        return node.metadata, LedgerNode(name, None, totals, problem=str(error))


def _totals(allocatable: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for resource in RESOURCES:
        try:
            found[resource] = units(allocatable.get(resource, "0"))
        except ValueError:
            continue
    return {resource: count for resource, count in found.items() if count}


def decode_pod(raw: bytes | msgspec.Raw) -> WatchedPod:
    """Raises msgspec.DecodeError."""
    return _pods.decode(raw)


def read_pod(raw: bytes) -> tuple[Metadata, BoundPod | None]:
    """A bound pod's JSON; None for one that holds no GPU. Raises msgspec.DecodeError."""
    pod = decode_pod(raw)
    return pod.metadata, _bound(pod)


def _bound(pod: WatchedPod) -> BoundPod | None:
    model = as_model(pod)
    try:
        demand = pod_demand(model)
    except Impossible:
        return None  # the node's agent refuses it
    if demand.nothing or not pod.spec.node_name or model.finished:
        return None
    chosen = chosen_in(demand, model.annotations)
    name = f"{model.namespace}/{model.name}"
    claim = PodClaim(demand, _held(pod, demand), chosen, name, owner_of(pod))
    confirmed = chosen is not None and model.annotations.get(ASSIGNED) == "true"
    away = pod.spec.affinity.pod_anti_affinity if pod.spec.affinity else None
    return BoundPod(pod.metadata.uid, pod.spec.node_name, claim, confirmed, bool(away and away.required))


# Of the Coscheduling plugin (kubernetes-sigs/scheduler-plugins).
GROUP_LABEL = "scheduling.x-k8s.io/pod-group"


def gang_of(pod: WatchedPod) -> str:
    """The group whose pods are scheduled together, as namespace/name; empty: the pod is scheduled alone."""
    group = pod.spec.scheduling_group
    name = group.pod_group_name if group else pod.metadata.labels.get(GROUP_LABEL, "")
    return f"{pod.metadata.namespace}/{name}" if name else ""


# Their pods serve in each other's place. Those of Jobs and of training operators would rather be close.
_SPREADING = frozenset({"ReplicaSet", "StatefulSet", "ReplicationController"})


def owner_of(pod: WatchedPod) -> str:
    """The controller whose replicas are to spread, as namespace/UID; empty: the pod is placed for itself."""
    meta = pod.metadata
    if meta.annotations.get(POLICY) in tuple(PlacementPolicy) or gang_of(pod):
        return ""
    owner = next((each for each in meta.owner_references if each.controller), None)
    # With the namespace: a pod's author may name any UID.
    return sys.intern(f"{meta.namespace}/{owner.uid}") if owner and owner.kind in _SPREADING else ""


def as_model(pod: WatchedPod) -> Pod:
    return Pod(pod.metadata, pod.spec, PodStatus(phase=pod.status.phase))


def names_gpus(pod: WatchedPod) -> bool:
    """Whether kube-scheduler takes it for one of the extender's pods, as it does one that asks for 0, too."""
    containers = (*pod.spec.containers, *pod.spec.init_containers)
    return any(not each.resources.limits.keys().isdisjoint(RESOURCES) for each in containers)


# The mode of each unit of a pair, and its place in the pair.
_MODES = {
    unit: (mode, place)
    for mode, pair in PAIRS.items()
    for place, unit in enumerate((pair.core_unit, pair.memory_unit))
}
_FRACTIONS = frozenset(name for pair in PAIRS.values() for name in (pair.core, pair.memory))


def asks_for_share(pod: Pod) -> bool:
    return any(_FRACTIONS & each.limits.keys() for each in pod.containers)


def _held(pod: WatchedPod, demand: PodDemand) -> tuple[HeldUnits, ...] | None:
    """Units that the pod holds by the kubelet's records; None while they do not show all of them."""
    statuses = [*pod.status.container_statuses, *pod.status.init_container_statuses]
    if not demand.slots or not any(each.allocated_resources_status for each in statuses):
        return None
    given = [
        (status.name, device.id)
        for status in statuses
        for devices in status.allocated_resources_status
        if devices.name in _FRACTIONS
        for device in devices.resources
    ]
    held: dict[tuple[str, Mode], tuple[set[str], set[str], set[str]]] = {}  # cores, blocks, containers
    for container, device_id in given:
        try:
            parsed = parse(device_id)
        except BadDeviceId:
            continue
        if parsed.unit in _MODES:
            mode, place = _MODES[parsed.unit]
            one = held.setdefault((parsed.gpu, mode), (set(), set(), set()))
            one[place].add(device_id)
            one[2].add(container)
    cores = sum(len(one[0]) for one in held.values())
    blocks = sum(len(one[1]) for one in held.values())
    if cores < sum(slot.demand.cores for slot in demand.slots) or blocks < sum(
        slot.demand.blocks for slot in demand.slots
    ):
        return None
    return tuple(
        HeldUnits(uuid, mode, len(one[0]), len(one[1]), len(one[2])) for (uuid, mode), one in held.items()
    )
