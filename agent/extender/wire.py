"""Requests and answers of kube-scheduler's extender protocol, in both node forms.

After `k8s.io/kube-scheduler/extender/v1`: keys are the Go fields' names, objects inside are the API's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agent.extender.objects import WatchedPod


class BadRequest(Exception):
    """A request that cannot be understood; the text says what is wrong."""


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw] = msgspec.field(default_factory=list)


class _Args(msgspec.Struct, rename="pascal"):
    pod: WatchedPod
    nodes: _NodeList | None = None
    node_names: list[str] | None = None


class _Named(msgspec.Struct):
    name: str


class _Object(msgspec.Struct):
    metadata: _Named


class Binding(msgspec.Struct, rename="pascal", frozen=True):
    """Whom to bind where."""

    pod_name: str
    pod_namespace: str
    node: str
    pod_uid: str = msgspec.field(name="PodUID")


@dataclass(frozen=True, slots=True)
class Asked:
    """A pod and the nodes in question. `objects`: the nodes as they came, where they came whole."""

    pod: WatchedPod
    names: Sequence[str]
    objects: Mapping[str, msgspec.Raw] | None = None


_args, _objects = msgspec.json.Decoder(_Args), msgspec.json.Decoder(_Object)
_bindings = msgspec.json.Decoder(Binding)
_NAME = re.compile("[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123, as the API server takes names
LONGEST_NAME = 253
_DEEP = "it is nested too deep"
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
    return Asked(found.pod, list(objects), objects)


def binding(body: bytes) -> Binding:
    """The arguments of bind. Raises BadRequest."""
    found = _decoded(_bindings.decode, body)
    if not (found.pod_name and found.pod_namespace and found.pod_uid and found.node):
        raise BadRequest("PodName, PodNamespace, PodUID and Node must all be given; nothing was done")
    # They become part of a path at the API server.
    for name in (found.pod_name, found.pod_namespace, found.node):
        if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            raise BadRequest(f"{name[:LONGEST_NAME]!r} is no name of a Kubernetes object; nothing was done")
    return found


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except RecursionError as error:
        raise BadRequest(f"the request cannot be understood: {_DEEP}; nothing was done") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request cannot be understood: {error}; nothing was done") from error


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
    """The answer to prioritize."""
    return msgspec.json.encode(
        [{"Host": name, "Score": score} for name, score in zip(names, scores, strict=True)]
    )


def bound(error: str = "") -> bytes:
    """The answer to bind."""
    return msgspec.json.encode({"Error": error})
