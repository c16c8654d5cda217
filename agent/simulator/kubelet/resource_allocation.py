"""A stand-in for the scheduler's allocation of claims, for one node: first fit by slice, then by position.

Facts: 1.37, `dynamic-resource-allocation/structured`. Use is counted from all claims, each time, against the
devices that are LISTED now: an allocated device off its list counts no more (kubernetes #140802).
"""

import re
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.model.modes import units

from .http_objects import Object
from .resource_objects import CLAIMS, CLASSES, SLICES, ResourceObjects

GIB: Final = 1 << 30
Counters = dict[tuple[str, str, str, str], int]
"""By driver, pool, set and name."""
_ATTRIBUTE: Final = re.compile(r"device\.attributes\['([^']+)'\]\.(\w+) == '([^']*)'")
_DRIVER: Final = re.compile(r"device\.driver == '([^']*)'")


class Unfit(Exception):
    """No device of this node fits a claim."""


@dataclass(slots=True)
class _Device:
    """A device as its slice lists it."""

    driver: str
    pool: str
    listed: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.driver, self.pool, self.listed["name"]

    @property
    def shared(self) -> bool:
        return bool(self.listed.get("allowMultipleAllocations"))

    def consumes(self) -> Iterator[tuple[tuple[str, str, str, str], int]]:
        for each in self.listed.get("consumesCounters", ()):
            for name, amount in each["counters"].items():
                yield (self.driver, self.pool, each["counterSet"], name), units(amount["value"])


@dataclass(slots=True)
class _Use:
    """The use of devices by allocated claims, of those listed now."""

    devices: set[tuple[str, str, str]] = field(default_factory=set)
    capacity: dict[tuple[tuple[str, str, str], str], int] = field(default_factory=lambda: defaultdict(int))
    counters: Counters = field(default_factory=lambda: defaultdict(int))

    def add(self, device: _Device, result: Mapping[str, Any]) -> None:
        if result.get("adminAccess"):
            return
        if device.key not in self.devices:  # one that is shared is charged once, at its first share
            self.devices.add(device.key)
            for counter, amount in device.consumes():
                self.counters[counter] += amount
        for name, amount in result.get("consumedCapacity", {}).items():
            self.capacity[device.key, name] += units(amount)


class Allocator:
    """Allocates claims to the devices of one node."""

    def __init__(self, objects: ResourceObjects, node: str) -> None:
        self._objects = objects
        self._node = node

    def allocation(self, claims: list[Object]) -> list[Object]:
        """`status.allocation` of each claim, all at once. Raises Unfit."""
        devices, counters = self._listed()
        by_key = {device.key: device for device in devices}
        use = _Use()
        for claim in self._objects.of(CLAIMS):
            for result in results(claim):
                if device := by_key.get((result["driver"], result["pool"], result["device"])):
                    use.add(device, result)
        return [self._one(claim, devices, counters, use) for claim in claims]

    def _listed(self) -> tuple[list[_Device], Counters]:
        """Devices in order, and the value of every counter; pools that are incomplete have none."""
        pools: dict[tuple[str, str], list[Object]] = defaultdict(list)
        for item in self._objects.of(SLICES):
            if item["spec"].get("nodeName") == self._node:
                pools[item["spec"]["driver"], item["spec"]["pool"]["name"]].append(item)
        devices: list[_Device] = []
        counters: Counters = {}
        for (driver, pool), items in pools.items():
            newest = max(item["spec"]["pool"]["generation"] for item in items)
            specs = [item["spec"] for item in items if item["spec"]["pool"]["generation"] == newest]
            if len(specs) < specs[0]["pool"]["resourceSliceCount"]:
                continue
            for spec in specs:
                devices += [_Device(driver, pool, each) for each in spec.get("devices", ())]
                for each in spec.get("sharedCounters", ()):
                    for name, amount in each["counters"].items():
                        counters[driver, pool, each["name"], name] = units(amount["value"])
        return devices, counters

    def _one(self, claim: Object, devices: list[_Device], counters: Counters, use: _Use) -> Object:
        found: list[Object] = []
        wanted = claim["spec"]["devices"]
        configuration = [{"source": "FromClaim", **each} for each in wanted.get("config", ())]
        for request in wanted.get("requests", ()):
            exact = request["exactly"]
            chosen = self._class(exact["deviceClassName"])
            configuration = [
                *({"source": "FromClass", **each} for each in chosen.get("config", ())),
                *configuration,
            ]
            selectors = [*chosen.get("selectors", ()), *exact.get("selectors", ())]
            for _ in range(exact.get("count", 1)):
                result = self._first(exact, selectors, devices, counters, use)
                if result is None:
                    raise Unfit("cannot allocate all claims")
                found.append({"request": request["name"], **result})
        return {"devices": {"results": found, "config": configuration}}

    def _class(self, name: str) -> Mapping[str, Any]:
        for each in self._objects.of(CLASSES):
            if each["metadata"]["name"] == name:
                spec: Mapping[str, Any] = each["spec"]
                return spec
        raise Unfit(f"device class {name} does not exist")

    def _first(
        self,
        exact: Mapping[str, Any],
        selectors: list[Mapping[str, Any]],
        devices: list[_Device],
        counters: Counters,
        use: _Use,
    ) -> Object | None:
        for device in devices:
            if not all(_selects(each["cel"]["expression"], device) for each in selectors):
                continue
            driver, pool, name = device.key
            result: Object = {"driver": driver, "pool": pool, "device": name}
            if exact.get("adminAccess"):
                return {**result, "adminAccess": True}
            if _tainted(device, exact) or not _counters_left(device, counters, use):
                continue
            if device.shared:
                consumed = _consumed(device, exact.get("capacity", {}).get("requests", {}), use)
                if consumed is None:
                    continue
                number = sum(use.capacity.values()) + len(use.devices)
                share = uuid.uuid5(uuid.NAMESPACE_OID, f"{device.key} {number} {consumed}")
                result |= {"shareID": str(share), "consumedCapacity": consumed}
            elif device.key in use.devices:
                continue
            use.add(device, result)
            return result
        return None


def results(claim: Mapping[str, Any]) -> list[Object]:
    """The devices that a claim has been allocated."""
    found: list[Object] = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
    return found


def _selects(expression: str, device: _Device) -> bool:
    """Conjunctions of an attribute's text and of the driver, and nothing else of CEL. Raises ValueError."""
    for term in expression.split(" && "):
        if found := _DRIVER.fullmatch(term):
            if device.driver != found[1]:
                return False
        elif found := _ATTRIBUTE.fullmatch(term):
            domain, name, value = found.groups()
            attributes = device.listed.get("attributes", {})
            own = attributes.get(name, {}) if domain == device.driver else {}
            if attributes.get(f"{domain}/{name}", own).get("string") != value:
                return False
        else:
            raise ValueError(f"{term!r}: more of CEL than is understood here")
    return True


def _tainted(device: _Device, exact: Mapping[str, Any]) -> bool:
    def tolerated(taint: Mapping[str, Any]) -> bool:
        return any(
            each.get("key") in (None, taint["key"]) and each.get("effect") in (None, "", taint["effect"])
            for each in exact.get("tolerations", ())
        )

    taints = device.listed.get("taints", ())
    return any(each["effect"] in ("NoSchedule", "NoExecute") and not tolerated(each) for each in taints)


def _counters_left(device: _Device, counters: Counters, use: _Use) -> bool:
    if device.shared and device.key in use.devices:
        return True
    return all(use.counters[key] + amount <= counters.get(key, 0) for key, amount in device.consumes())


def _consumed(device: _Device, asked: Mapping[str, str], use: _Use) -> dict[str, str] | None:
    """The capacity that one more share of a device takes; None: it has not so much left."""
    if not asked.keys() <= device.listed.get("capacity", {}).keys():
        return None
    consumed: dict[str, str] = {}
    for name, capacity in device.listed.get("capacity", {}).items():
        amount = _by_policy(asked.get(name), capacity)
        if amount is None or use.capacity[device.key, name] + amount > units(capacity["value"]):
            return None
        consumed[name] = f"{amount // GIB}Gi" if amount and amount % GIB == 0 else str(amount)
    return consumed


def _by_policy(asked: str | None, capacity: Mapping[str, Any]) -> int | None:
    """A request as its policy rounds it up; None: more than the policy lets anybody have."""
    policy = capacity.get("requestPolicy")
    if policy is None:
        return units(asked or capacity["value"])
    amount = units(asked or policy["default"])
    if values := sorted(units(each) for each in policy.get("validValues", ())):
        return next((each for each in values if each >= amount), None)
    allowed = policy.get("validRange", {})
    low = units(allowed.get("min", "0"))
    if (step := units(allowed.get("step", "0"))) and amount > low:
        amount = low + -(-(amount - low) // step) * step
    amount = max(amount, low)
    return None if amount > units(allowed.get("max", capacity["value"])) else amount
