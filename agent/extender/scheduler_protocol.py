"""Requests and answers of kube-scheduler's extender protocol, in both node forms.

After `k8s.io/kube-scheduler/extender/v1`: keys are the Go fields' names, objects inside are the API's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from agent.extender.eviction import only_gpus_matter
from agent.extender.objects import WatchedPod, decode_pod


class BadRequest(Exception):
    """A request that cannot be understood; the text says what is wrong."""


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Args(msgspec.Struct, rename="pascal"):
    pod: WatchedPod
    nodes: _NodeList | None = None
    node_names: list[str] | None = None


class _ObjectMeta(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Object(msgspec.Struct):
    metadata: _ObjectMeta


class _Victim(msgspec.Struct):
    """A pod as a whole, or its UID alone, which Go calls a MetaPod."""

    metadata: _ObjectMeta = msgspec.field(default_factory=_ObjectMeta)
    meta_uid: str = msgspec.field(default="", name="UID")

    @property
    def uid(self) -> str:
        return self.meta_uid or self.metadata.uid


class _Victims(msgspec.Struct, rename="pascal"):
    pods: list[_Victim] = msgspec.field(default_factory=list)
    violations: int = msgspec.field(default=0, name="NumPDBViolations")


class _PreemptionArgs(msgspec.Struct, rename="pascal"):
    pod: msgspec.Raw
    node_name_to_victims: dict[str, _Victims] | None = None
    node_name_to_meta_victims: dict[str, _Victims] | None = None


class BindingArgs(msgspec.Struct, rename="pascal", frozen=True):
    pod_name: str
    pod_namespace: str
    node: str
    pod_uid: str = msgspec.field(name="PodUID")

    @property
    def pod(self) -> str:
        """namespace/name."""
        return f"{self.pod_namespace}/{self.pod_name}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A pod and the nodes in question. `objects`: the nodes as they came, where they came whole."""

    pod: WatchedPod
    names: Sequence[str]
    objects: Mapping[str, msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class Preemption:
    """A pod and, by node, the UIDs of its victims, the most important first."""

    pod: WatchedPod
    only_gpus: bool  # whether the pod asks of a node for nothing else that victims could hold
    victims: Mapping[str, Sequence[str]]
    violations: Mapping[str, int]  # of PodDisruptionBudgets, by node


_args, _objects = msgspec.json.Decoder(_Args), msgspec.json.Decoder(_Object)
_bindings = msgspec.json.Decoder(BindingArgs)
_preemptions = msgspec.json.Decoder(_PreemptionArgs)
_NAME = re.compile("[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123, as the API server takes names
LONGEST_NAME = 253
T = TypeVar("T")


def asked(body: bytes) -> Asked:
    """The arguments of filter and prioritize. Raises BadRequest."""
    found = _decoded(_args.decode, body)
    if not found.pod.metadata.uid:
        raise BadRequest("the pod has no UID; nothing was done")
    if found.node_names is not None:
        return Asked(found.pod, found.node_names)
    if found.nodes is None:
        raise BadRequest("there are neither Nodes nor NodeNames; nothing was done")
    objects = {_decoded(_objects.decode, raw).metadata.name: raw for raw in found.nodes.items}
    if "" in objects:
        raise BadRequest("a node has no name; nothing was done")
    return Asked(found.pod, list(objects), objects)


def preemption(body: bytes) -> Preemption:
    """The arguments of preempt. Raises BadRequest."""
    found = _decoded(_preemptions.decode, body)
    pod, only_gpus = _decoded(decode_pod, found.pod), _decoded(only_gpus_matter, found.pod)
    proposed = found.node_name_to_meta_victims
    if proposed is None:
        proposed = found.node_name_to_victims
    if proposed is None:
        raise BadRequest("there are neither NodeNameToVictims nor NodeNameToMetaVictims; nothing was done")
    victims = {node: [each.uid for each in one.pods] for node, one in proposed.items()}
    if not all(map(all, victims.values())):
        raise BadRequest("a victim has no UID; nothing was done")
    return Preemption(pod, only_gpus, victims, {node: one.violations for node, one in proposed.items()})


def binding(body: bytes) -> BindingArgs:
    """The arguments of bind. Raises BadRequest."""
    found = _decoded(_bindings.decode, body)
    if not (found.pod_name and found.pod_namespace and found.pod_uid and found.node):
        raise BadRequest("PodName, PodNamespace, PodUID and Node must all be given; nothing was done")
    # They become part of a path at the API server.
    for name in (found.pod_name, found.pod_namespace, found.node):
        if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            raise BadRequest(f"{name[:LONGEST_NAME]!r} is no name of a Kubernetes object; nothing was done")
    return found


def _decoded(decode: Callable[[Any], T], data: bytes | msgspec.Raw) -> T:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise BadRequest(f"the request cannot be understood: {why}; nothing was done") from error


def filtered(
    request: Asked, fitting: Sequence[str], refused: Mapping[str, str], unresolvable: bool = False
) -> bytes:
    """The answer to filter; `unresolvable`: nothing that ends on the nodes would help."""
    answer: dict[str, object] = {
        "Nodes": None,
        "NodeNames": None,
        "FailedNodes": {} if unresolvable else refused,
        "FailedAndUnresolvableNodes": refused if unresolvable else {},
        "Error": "",
    }
    if request.objects is None:
        answer["NodeNames"] = fitting
    else:
        answer["Nodes"] = {"items": [request.objects[name] for name in fitting]}
    return msgspec.json.encode(answer)


def prioritized(names: Sequence[str], scores: Sequence[int]) -> bytes:
    return msgspec.json.encode(
        [{"Host": name, "Score": score} for name, score in zip(names, scores, strict=True)]
    )


def preempted(request: Preemption, victims: Mapping[str, Sequence[str]]) -> bytes:
    """The answer to preempt: the nodes that count, and whom they lose."""
    found = {
        node: {
            "Pods": [{"UID": uid} for uid in uids],
            "NumPDBViolations": min(request.violations[node], len(uids)),
        }
        for node, uids in victims.items()
    }
    return msgspec.json.encode({"NodeNameToMetaVictims": found})


def bound(error: str = "") -> bytes:
    return msgspec.json.encode({"Error": error})
