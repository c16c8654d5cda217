"""The work of a cluster's controllers on the claims of pods: make, reserve, free and delete them."""

from collections.abc import Collection, Mapping
from typing import Any

from .http_objects import Object
from .pod_specs import PodSpec
from .resource_allocation import Allocator, Unfit
from .resource_objects import CLAIMS, ResourceObjects, WriteRefused


class ClaimControl:
    """The claims of pods. A pod is known by its UID, its spec and the names of its claims."""

    def __init__(self, objects: ResourceObjects, node: str) -> None:
        self._objects = objects
        self._allocator = Allocator(objects, node)

    def make(self, spec: PodSpec, uid: str) -> dict[str, str]:
        """Make what the pod's templates ask for; the names of its claims, by their names in the pod."""
        names: dict[str, str] = {}
        for each in spec.claims:
            names[each.name] = each.claim or f"{spec.name}-{each.name}-{uid[:5]}"
            if each.template is not None:
                owner = {"apiVersion": "v1", "kind": "Pod", "name": spec.name, "uid": uid, "controller": True}
                metadata = {"name": names[each.name], "namespace": spec.namespace, "ownerReferences": [owner]}
                self._objects.create(CLAIMS, {"metadata": metadata, "spec": dict(each.template)})
        return names

    def allocate(self, spec: PodSpec, uid: str, names: Mapping[str, str]) -> str:
        """Allocate and reserve all claims of a pod, or none; why not, or nothing."""
        try:
            claims = [self._objects.get(CLAIMS, (spec.namespace, name)) for name in names.values()]
            unallocated = [claim for claim in claims if "allocation" not in claim.get("status", {})]
            allocations = self._allocator.allocation(unallocated)
        except (WriteRefused, Unfit) as error:
            return str(error)
        ready = dict(zip((claim["metadata"]["uid"] for claim in unallocated), allocations, strict=True))
        for claim in claims:
            status = dict(claim.get("status", {}))
            status.setdefault("allocation", ready.get(claim["metadata"]["uid"]))
            reserved = [each for each in status.get("reservedFor", ()) if each["uid"] != uid]
            status["reservedFor"] = [*reserved, {"resource": "pods", "name": spec.name, "uid": uid}]
            self._set(claim, status)
        return ""

    def release(self, alive: Collection[str], existing: Collection[str]) -> None:
        """Free the claims of pods that run no more; delete those whose pod is gone. UIDs of pods."""
        for claim in list(self._objects.of(CLAIMS)):
            status = claim.get("status", {})
            kept = [each for each in status.get("reservedFor", ()) if each["uid"] in alive]
            if kept != status.get("reservedFor", []):
                self._set(claim, {**status, "reservedFor": kept} if kept else {})
            owners = claim["metadata"].get("ownerReferences", [])
            if owners and owners[0]["uid"] not in existing:
                self._objects.delete(CLAIMS, _key(claim))

    def _set(self, claim: Object, status: Mapping[str, Any]) -> None:
        self._objects.set_status(_key(claim), status)


def _key(claim: Mapping[str, Any]) -> tuple[str, str]:
    return claim["metadata"].get("namespace", ""), claim["metadata"]["name"]
