"""Objects of the API group `resource.k8s.io`, as JSON: slices, classes, claims, and the rules of writes.

Facts: API server 1.37, `pkg/apis/resource/validation`: the limits of a slice that holds counters or devices.
"""

import copy
import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from .http_objects import Object

GROUP: Final = "resource.k8s.io/v1"
SLICES, CLASSES, CLAIMS = "resourceslices", "deviceclasses", "resourceclaims"
KINDS: Final = {SLICES: "ResourceSlice", CLASSES: "DeviceClass", CLAIMS: "ResourceClaim"}
LONGEST_LISTS: Final = {"sharedCounters": 8, "devices": 128}
MOST_COUNTERS, MOST_DEVICES_WITH_COUNTERS, MOST_ATTRIBUTES, MOST_TAINTS = 32, 64, 32, 16

Key = tuple[str, str]


class WriteRefused(Exception):
    """A write that the API server refuses: `code` is the HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ResourceObjects:
    """All objects of the group; keys are namespace (empty for slices and classes) and name."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._numbers = itertools.count(1)
        self._objects: dict[str, dict[Key, Object]] = {collection: {} for collection in KINDS}
        # Fields of slices that the server drops without a word, as it does where a feature gate is off.
        self.dropped: frozenset[str] = frozenset()
        # So many next reads of claims by the kubelet are refused: the node authorizer's graph lags behind.
        self.forbidden_reads = 0

    def of(self, collection: str) -> Iterator[Object]:
        """The objects of a collection, by key."""
        yield from (item for _, item in sorted(self._objects[collection].items()))

    def get(self, collection: str, key: Key) -> Object:
        """Raises WriteRefused (404)."""
        try:
            return self._objects[collection][key]
        except KeyError:
            raise WriteRefused(404, f'{collection}.resource.k8s.io "{key[1]}" not found') from None

    def create(self, collection: str, item: Mapping[str, Any], *, trial: bool = False) -> Object:
        """Raises WriteRefused. `trial`: nothing is stored (dryRun)."""
        key = _key(item)
        if key in self._objects[collection]:
            raise WriteRefused(409, f'{collection}.resource.k8s.io "{key[1]}" already exists')
        number = next(self._numbers)
        uid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{collection}-{number}"))
        metadata = {"uid": uid, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        return self._store(collection, key, item, metadata, trial=trial)

    def replace(self, collection: str, item: Mapping[str, Any]) -> Object:
        """PUT. Raises WriteRefused: 409 for a resource version that is not the newest."""
        key = _key(item)
        known = self.get(collection, key)["metadata"]
        given = item["metadata"]
        if given.get("resourceVersion", known["resourceVersion"]) != known["resourceVersion"]:
            raise WriteRefused(409, f'{collection} "{key[1]}": the object has been modified')
        if given.get("uid", known["uid"]) != known["uid"]:
            raise WriteRefused(409, f'{collection} "{key[1]}": another object of that name')
        kept = {name: known[name] for name in ("uid", "generation", "creationTimestamp")}
        if item.get("spec") != self.get(collection, key).get("spec"):
            kept["generation"] += 1
        return self._store(collection, key, item, kept)

    def set_status(self, key: Key, status: Mapping[str, Any]) -> Object:
        """Replace the status of a claim. Raises WriteRefused (404)."""
        return self.replace(CLAIMS, {**self.get(CLAIMS, key), "status": dict(status)})

    def delete(self, collection: str, key: Key) -> Object:
        """Raises WriteRefused (404)."""
        gone = self.get(collection, key)
        del self._objects[collection][key]
        self._changed()
        return gone

    def wipe(self, node: str, driver: str | None = None) -> None:
        """Delete the slices of a node, of one driver or of all: what its kubelet does."""
        for item in list(self.of(SLICES)):
            if item["spec"].get("nodeName") == node and driver in (None, item["spec"]["driver"]):
                self.delete(SLICES, _key(item))

    def _store(
        self,
        collection: str,
        key: Key,
        item: Mapping[str, Any],
        kept: Mapping[str, Any],
        *,
        trial: bool = False,
    ) -> Object:
        stored = copy.deepcopy(dict(item))
        if collection == SLICES:
            stored["spec"] = _without(stored["spec"], self.dropped)
            _check_slice(stored["spec"])
        number = str(next(self._numbers))
        stored["metadata"] = {**stored["metadata"], **kept, "resourceVersion": number}
        stored |= {"apiVersion": GROUP, "kind": KINDS[collection]}
        if not trial:
            self._objects[collection][key] = stored
            self._changed()
        return stored


def _key(item: Mapping[str, Any]) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _without(value: Any, names: frozenset[str]) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, dict):
        return {key: _without(inner, names) for key, inner in value.items() if key not in names}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


def _check_slice(spec: Mapping[str, Any]) -> None:
    """Raises WriteRefused (422)."""
    wrong = [
        f"spec.{name}: {len(spec[name])} items, at most {most}"
        for name, most in LONGEST_LISTS.items()
        if len(spec.get(name, ())) > most
    ]
    if spec.get("sharedCounters") and spec.get("devices"):
        wrong.append("spec: sharedCounters and devices exclude each other")
    wrong += [
        f"counter set {each['name']}: more than {MOST_COUNTERS} counters"
        for each in spec.get("sharedCounters", ())
        if len(each["counters"]) > MOST_COUNTERS
    ]
    devices = spec.get("devices", ())
    special = any(each.get("consumesCounters") or each.get("taints") for each in devices)
    if special and len(devices) > MOST_DEVICES_WITH_COUNTERS:
        wrong.append(f"spec.devices: more than {MOST_DEVICES_WITH_COUNTERS} with counters or taints")
    for each in devices:
        if len(each.get("attributes", ())) + len(each.get("capacity", ())) > MOST_ATTRIBUTES:
            wrong.append(f"device {each['name']}: more than {MOST_ATTRIBUTES} attributes and capacities")
        if len(each.get("taints", ())) > MOST_TAINTS:
            wrong.append(f"device {each['name']}: more than {MOST_TAINTS} taints")
    if wrong:
        raise WriteRefused(422, "; ".join(wrong))
