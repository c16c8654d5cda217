"""The JSON of the API's objects and answers, as far as it needs no state."""

import json
from collections.abc import Mapping
from typing import Any

from .pod_specs import ContainerSpec, PodSpec

Object = dict[str, Any]


def container(spec: ContainerSpec) -> Object:
    """A container of a pod's spec."""
    limits = {resource: str(count) for resource, count in spec.limits.items()}
    found: Object = {"name": spec.name, "resources": {"limits": limits, "requests": limits}}
    if spec.claims:
        found["resources"]["claims"] = [{"name": each} for each in spec.claims]
    return {**found, "restartPolicy": "Always"} if spec.restartable else found


def namespace(name: str, labels: Mapping[str, str]) -> Object:
    """A namespace."""
    return {"metadata": {"name": name, "uid": f"namespace-{name}", "labels": dict(labels)}}


def merge(into: dict[str, str], patch: Mapping[str, str | None]) -> None:
    """A JSON merge patch of a map of texts."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = value


def without_version(item: Object) -> Object:
    """The part that must differ for an object to have changed."""
    return {**item, "metadata": {**item["metadata"], "resourceVersion": ""}}


def status_text(code: int, message: str) -> str:
    """The answer to a call that failed."""
    return json.dumps({"kind": "Status", "code": code, "message": message})


def missing_text(kind: str, name: str) -> str:
    """The answer where there is no such object."""
    status = {"kind": "Status", "code": 404, "reason": "NotFound", "message": f'{kind} "{name}" not found'}
    return json.dumps({**status, "details": {"kind": kind, "name": name}})


def line(event: Object) -> bytes:
    """One event of a watch."""
    return json.dumps(event).encode() + b"\n"


def claims_of_spec(spec: PodSpec) -> Object:
    """The claims of a pod's spec; a template bears the name that the pod gives its claim."""
    if not spec.claims:
        return {}
    claims = (
        {"name": each.name}
        | ({"resourceClaimName": each.claim} if each.claim else {"resourceClaimTemplateName": each.name})
        for each in spec.claims
    )
    return {"resourceClaims": list(claims)}


def claims_of_status(names: Mapping[str, str]) -> Object:
    """The names of a pod's claims, by their names in the pod."""
    statuses = [{"name": name, "resourceClaimName": claim} for name, claim in names.items()]
    return {"resourceClaimStatuses": statuses} if statuses else {}
