"""ResourceSlices of the node, as plain objects: pure.

One slice holds the counters, one per GPU, and others the devices. A GPU's devices consume its counter, so
that they exclude each other. At most 8 sets of counters fit in a slice, but 32 counters in a set; 64 devices.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from agent.model.cuda import semantic
from agent.model.gpu import Driver, Gpu
from agent.model.modes import SHARES, WHOLE_GPUS, Mode, units
from agent.model.pod import CORES, MPS, Metadata
from agent.model.resource_claim import DRIVER, WORDS, device_name, parse_device, pool_of

PATH: Final = "/apis/resource.k8s.io/v1/resourceslices"
COUNTERS_PER_SET: Final = 32
DEVICES_PER_SLICE: Final = 64
LONGEST_NODE: Final = 200
LONGEST_TEXT: Final = 64  # of an attribute's value
# Fields that an API server without the gate drops without a word, and the gate.
GATES: Final = {
    "sharedCounters": "DRAPartitionableDevices",
    "consumesCounters": "DRAPartitionableDevices",
    "allowMultipleAllocations": "DRAConsumableCapacity",
    "requestPolicy": "DRAConsumableCapacity",
    "taints": "DRADeviceTaints",
}
# Keys of taints, which keep new claims away and let holders be.
UNHEALTHY: Final = f"{DRIVER}/unhealthy"
UNAVAILABLE: Final = f"{DRIVER}/unavailable"
RESERVED: Final = f"{DRIVER}/reserved"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeviceOffer:
    """A GPU that the node offers as devices. `taints`: key and value, by mode."""

    gpu: Gpu
    modes: tuple[Mode, ...]
    clients: int = 1  # how many shares of it may be held at once
    pcie_root: str = ""
    nvlink_group: int | None = None
    taints: Mapping[Mode, tuple[tuple[str, str], ...]] = field(default_factory=dict)


class Published(msgspec.Struct, frozen=True):
    """A ResourceSlice as the API server has it."""

    metadata: Metadata
    spec: Document = msgspec.field(default_factory=dict)

    @property
    def devices(self) -> list[Document]:
        return self.spec.get("devices") or []

    @property
    def generation(self) -> int:
        return int(self.spec["pool"]["generation"])


def names(node: str) -> tuple[str, str]:
    """Of the slice with the counters, and the beginning of those with devices."""
    short = node if len(node) <= LONGEST_NODE else hashlib.sha256(node.encode()).hexdigest()[:16]
    return f"{short}-{DRIVER}-counters", f"{short}-{DRIVER}-devices-"


def contents(
    node: str, offers: Sequence[DeviceOffer], driver: Driver | None, kept: Sequence[Document] = ()
) -> dict[str, Document]:
    """By name, devices or counters of each slice. `kept`: devices of GPUs that are not offered any more."""
    ordered = sorted(offers, key=lambda each: each.gpu.index)
    sets = {each.gpu.uuid: f"gpus-{at // COUNTERS_PER_SET}" for at, each in enumerate(ordered)}
    counters: dict[str, dict[str, Document]] = {}
    for uuid, name in sets.items():
        counters.setdefault(name, {})[uuid.lower()] = {"value": "1"}
    for device in kept:
        for used in device.get("consumesCounters") or ():
            counters.setdefault(used["counterSet"], {}).update(used["counters"])
    devices = [
        _device(each, mode, sets[each.gpu.uuid], driver)
        # Shares fill GPUs from the first one up, whole GPUs go from the last one down: the first fit counts.
        for mode, each in [
            *((SHARES, each) for each in ordered),
            *((WHOLE_GPUS, each) for each in reversed(ordered)),
        ]
        if mode in each.modes
    ]
    devices += kept
    counting, listing = names(node)
    parts = [devices[at : at + DEVICES_PER_SLICE] for at in range(0, len(devices), DEVICES_PER_SLICE)]
    found: dict[str, Document] = {
        counting: {"sharedCounters": [{"name": n, "counters": each} for n, each in sorted(counters.items())]}
    }
    found |= {f"{listing}{number}": {"devices": part} for number, part in enumerate(parts)}
    return found if devices else {}


def _device(offer: DeviceOffer, mode: Mode, counter_set: str, driver: Driver | None) -> Document:
    gpu = offer.gpu
    device: Document = {
        "name": device_name(gpu.uuid, mode),
        "attributes": dict(_attributes(offer, mode, driver)),
        "capacity": {"memory": {"value": f"{gpu.memory_bytes >> 20}Mi"}},
        "consumesCounters": [{"counterSet": counter_set, "counters": {gpu.uuid.lower(): {"value": "1"}}}],
    }
    if mode is SHARES:
        blocks = MPS.blocks(gpu.memory_bytes)
        device["allowMultipleAllocations"] = True
        device["capacity"] = {
            "cores": _shared(str(CORES), "1"),
            "memory": _shared(f"{blocks}Gi", "1Gi"),
            # One for each share: MPS serves so many processes at once.
            "clients": {"value": str(offer.clients), "requestPolicy": {"default": "1", "validValues": ["1"]}},
        }
    if taints := offer.taints.get(mode):
        device["taints"] = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in taints]
    return device


def _shared(all_of_it: str, step: str) -> Document:
    """A capacity that shares have parts of; one that does not say how much gets all."""
    policy = {"default": all_of_it, "validRange": {"min": step, "step": step}}
    return {"value": all_of_it, "requestPolicy": policy}


def _attributes(offer: DeviceOffer, mode: Mode, driver: Driver | None) -> Iterator[tuple[str, Document]]:
    gpu = offer.gpu
    yield "mode", {"string": WORDS[mode]}
    yield "index", {"int": gpu.index}
    yield "uuid", {"string": gpu.uuid}
    yield "product", {"string": gpu.product[:LONGEST_TEXT]}
    yield "computeCapability", {"version": "{}.{}.0".format(*gpu.compute_capability)}
    if driver:
        yield "cudaVersion", {"version": "{}.{}.0".format(*driver.cuda_version)}
        if version := semantic(driver.version):
            yield "driverVersion", {"version": version}
    if offer.nvlink_group is not None:
        yield "nvlinkGroup", {"int": offer.nvlink_group}
    yield "resource.kubernetes.io/pciBusID", {"string": gpu.pci_bus_id}
    if offer.pcie_root:
        yield "resource.kubernetes.io/pcieRoot", {"string": offer.pcie_root}
    if gpu.numa_node is not None and gpu.numa_node >= 0:
        yield "resource.kubernetes.io/numaNode", {"int": gpu.numa_node}


@dataclass(frozen=True, slots=True)
class Write:
    """A slice that is to be written: created where `version` is empty."""

    name: str
    body: Document
    version: str = ""


def writes(
    node: str, node_uid: str | None, wanted: Mapping[str, Document], found: Mapping[str, Published]
) -> list[Write]:
    """The writes that make slices as they are wanted; one where devices stay and are otherwise than before.

    Where devices come or go a new generation of all slices begins, and counts once it is complete.
    """
    there = [found[name] for name in wanted if name in found]
    same = len(there) == len(wanted) and all(
        _shape(wanted[each.metadata.name]) == _shape(each.spec) for each in there
    )
    one = len({each.generation for each in there}) == 1
    one = one and all(each.spec["pool"]["resourceSliceCount"] == len(wanted) for each in there)
    newest = max((each.generation for each in found.values()), default=0)
    generation = newest if same and one else newest + 1
    pool = {"name": pool_of(node), "generation": generation, "resourceSliceCount": len(wanted)}
    return [
        Write(
            name,
            _slice(name, node, node_uid, pool, _dated(content, found.get(name))),
            found[name].metadata.resource_version if name in found else "",
        )
        for name, content in wanted.items()
        if not (same and one) or differences(content, found[name].spec)
    ]


def rewrites(found: list[Write]) -> list[Write]:
    """The writes where no slice may be created: none where one would have to be.

    The others would begin a new generation, which is never complete, and so again with the next look.
    """
    return found if all(each.version for each in found) else []


def _slice(name: str, node: str, node_uid: str | None, pool: Document, content: Document) -> Document:
    metadata: Document = {"name": name}
    if node_uid:
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid, "controller": True}
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, **content},
    }


def _shape(content: Document) -> object:
    """The part of which each change begins a new generation: names of devices, or all counters."""
    if "devices" in content:
        return [each["name"] for each in content["devices"]]
    return content.get("sharedCounters")


def _dated(content: Document, before: Published | None) -> Document:
    """With the times of taints that stand already."""
    times = {
        (device["name"], taint["key"], taint.get("value")): taint.get("timeAdded")
        for device in (before.devices if before else ())
        for taint in device.get("taints") or ()
    }
    if not times:
        return content
    devices = []
    for device in content.get("devices", ()):
        taints = [
            {**taint, "timeAdded": time}
            if (time := times.get((device["name"], taint["key"], taint["value"])))
            else taint
            for taint in device.get("taints") or ()
        ]
        devices.append({**device, "taints": taints} if taints else device)
    return {**content, "devices": devices}


def differences(sent: object, got: object, path: str = "") -> list[str]:
    """Paths at which an object that was read is not as it was sent, or is to be.

    A quantity may be written otherwise, what is empty may be left out, and taints have got a time.
    """
    if isinstance(sent, dict) and isinstance(got, dict):
        keys = sent.keys() | (got.keys() - {"timeAdded"} if path else frozenset())
        return [
            each
            for key in sorted(keys)
            for each in differences(sent.get(key), got.get(key), f"{path}.{key}" if path else key)
        ]
    if isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        return [
            each
            for number, (one, other) in enumerate(zip(sent, got, strict=True))
            for each in differences(one, other, f"{path}[{number}]")
        ]
    return [] if sent == got or (not sent and not got) or _same_amount(sent, got) else [path]


def _same_amount(one: object, other: object) -> bool:
    try:
        return isinstance(one, str) and isinstance(other, str) and units(one) == units(other)
    except ValueError:
        return False


def missing_gates(sent: Document, got: Document) -> list[str]:
    """The feature gates for want of which the API server dropped fields of a slice."""
    paths = differences(sent, got)
    return sorted({gate for word, gate in GATES.items() for path in paths if word in path})


def gpus_of(devices: Sequence[Document]) -> frozenset[str]:
    """The GPUs, by UUID, of which there are devices."""
    found = (parse_device(each["name"]) for each in devices)
    uuids = {each["name"]: each.get("attributes", {}).get("uuid", {}).get("string") for each in devices}
    return frozenset(
        uuids[each["name"]] or f"GPU-{parsed[0].removeprefix('gpu-')}"
        for each, parsed in zip(devices, found, strict=True)
        if parsed
    )
