"""ResourceSlices as plain objects: names, limits, generations, and what is read back."""

import copy
from typing import Any

import pytest

from agent.dra.publisher import LEAVING_JITTER, LEAVING_LOOK_SECONDS, SETTLED_SECONDS
from agent.dra.slices import (
    RESERVED,
    UNHEALTHY,
    DeviceOffer,
    Document,
    Published,
    contents,
    differences,
    gpus_of,
    missing_gates,
    rewrites,
    writes,
)
from agent.model.gpu import Driver, Gpu, Topology
from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.model.pod import Metadata
from agent.model.resource_claim import DRIVER, device_name, parse_device, share_of

NODE = "worker-1"
BOTH = (WHOLE_GPUS, SHARES)


def gpu(index: int) -> Gpu:
    uuid = f"GPU-{index:08d}-86f3-7a43-b711-4771313afc50"
    return Gpu(uuid, index, index, f"0000:{index:02x}:00.0", "NVIDIA H200", 143771 << 20, (9, 0), False, 0)


def offers(count: int, **more: Any) -> list[DeviceOffer]:
    return [DeviceOffer(gpu(index), BOTH, 48, **more) for index in range(count)]


def published(wanted: dict[str, Document], generation: int = 1) -> dict[str, Published]:
    """As the API server has them after a write: with times of taints, and quantities in its own form."""
    found = {}
    for number, write in enumerate(writes(NODE, None, wanted, {})):
        spec = copy.deepcopy(write.body["spec"])
        spec["pool"]["generation"] = generation
        for device in spec.get("devices", ()):
            for taint in device.get("taints", ()):
                taint["timeAdded"] = "2026-11-24T00:00:00Z"
        found[write.name] = Published(
            Metadata(name=write.name, uid=f"uid-{number}", resource_version=str(number)), spec
        )
    return found


def test_devices_of_a_gpu_exclude_each_other_by_its_counter() -> None:
    wanted = contents(NODE, offers(2), Driver("580.95.05", "13.580.95.05", (13, 0)))
    counters, devices = wanted.values()
    assert [each["name"] for each in counters["sharedCounters"]] == ["gpus-0"]
    assert set(counters["sharedCounters"][0]["counters"]) == {gpu(0).uuid.lower(), gpu(1).uuid.lower()}
    for device in devices["devices"]:
        (used,) = device["consumesCounters"]
        uuid, mode = parse_device(device["name"]) or ("", Mode.OFF)
        assert used == {"counterSet": "gpus-0", "counters": {uuid: {"value": "1"}}}
        assert bool(device.get("allowMultipleAllocations")) is (mode is SHARES)
        assert device["attributes"]["driverVersion"] == {"version": "580.95.5"}
        assert device["attributes"]["resource.kubernetes.io/numaNode"] == {"int": 0}
    share = devices["devices"][0]["capacity"]
    assert share["memory"]["value"] == "139Gi"
    assert share["clients"]["requestPolicy"] == {"default": "1", "validValues": ["1"]}


def test_shares_fill_from_the_first_gpu_and_whole_ones_go_from_the_last() -> None:
    names = [each["name"] for each in list(contents(NODE, offers(3), None).values())[1]["devices"]]
    assert names == [device_name(gpu(i).uuid, SHARES) for i in range(3)] + [
        device_name(gpu(i).uuid, WHOLE_GPUS) for i in (2, 1, 0)
    ]


@pytest.mark.parametrize(("gpus", "slices", "sets"), [(32, 2, 1), (33, 3, 2), (100, 5, 4)])
def test_limits_of_a_slice_hold(gpus: int, slices: int, sets: int) -> None:
    wanted = contents(NODE, offers(gpus), None)
    assert len(wanted) == slices
    assert len(wanted[f"{NODE}-{DRIVER}-counters"]["sharedCounters"]) == sets
    for content in wanted.values():
        assert len(content.get("devices", ())) <= 64
        assert all(len(each["counters"]) <= 32 for each in content.get("sharedCounters", ()))


def test_a_taint_takes_one_write_of_the_same_generation() -> None:
    before = published(contents(NODE, offers(2), None), 7)
    assert writes(NODE, None, contents(NODE, offers(2), None), before) == []
    sick = offers(2, taints={SHARES: ((UNHEALTHY, "suspect"),)})
    (write,) = writes(NODE, None, contents(NODE, sick, None), before)
    assert write.body["spec"]["pool"]["generation"] == 7
    assert write.version


def test_a_gpu_that_goes_begins_a_generation_of_all_slices() -> None:
    before = published(contents(NODE, offers(3), None), 7)
    found = writes(NODE, "uid-of-node", contents(NODE, offers(2), None), before)
    assert [each.body["spec"]["pool"]["generation"] for each in found] == [8, 8]
    assert {each.name for each in found} == set(before)
    assert found[0].body["metadata"]["ownerReferences"][0]["uid"] == "uid-of-node"


def test_a_slice_that_was_wiped_is_created_again_with_a_newer_generation() -> None:
    wanted = contents(NODE, offers(2), None)
    before = published(wanted, 3)
    gone = before.popitem()[0]
    found = writes(NODE, None, wanted, before)
    assert {each.name: bool(each.version) for each in found} == {**dict.fromkeys(before, True), gone: False}
    assert {each.body["spec"]["pool"]["generation"] for each in found} == {4}


def test_no_new_generation_begins_while_no_slice_may_be_created() -> None:
    wanted = contents(NODE, offers(1), None)
    there = published(wanted)
    (counters, listing) = sorted(wanted)
    assert rewrites(writes(NODE, None, wanted, {counters: there[counters]})) == []
    tainted = contents(NODE, offers(1, taints={SHARES: (("key", "value"),)}), None)
    (write,) = rewrites(writes(NODE, None, tainted, there))
    assert write.name == listing


def test_times_of_taints_stay() -> None:
    tainted = offers(1, taints={SHARES: ((UNHEALTHY, "suspect"),)})
    before = published(contents(NODE, tainted, None))
    more = offers(1, taints={SHARES: ((UNHEALTHY, "suspect"), (RESERVED, "whole"))})
    (write,) = writes(NODE, None, contents(NODE, more, None), before)
    taints = write.body["spec"]["devices"][0]["taints"]
    assert [each.get("timeAdded") for each in taints] == ["2026-11-24T00:00:00Z", None]


def test_a_gpu_that_leaves_is_not_looked_at_before_it_can_have_settled() -> None:
    assert LEAVING_LOOK_SECONDS * (1 - LEAVING_JITTER) > SETTLED_SECONDS


def test_a_device_of_a_gpu_that_left_keeps_its_counter() -> None:
    old = published(contents(NODE, offers(2), None))
    kept = [each for slice_ in old.values() for each in slice_.devices if gpus_of([each]) == {gpu(1).uuid}]
    wanted = contents(NODE, offers(1), None, kept)
    assert wanted[f"{NODE}-{DRIVER}-counters"] == contents(NODE, offers(2), None)[f"{NODE}-{DRIVER}-counters"]
    assert gpus_of(wanted[f"{NODE}-{DRIVER}-devices-0"]["devices"]) == {gpu(0).uuid, gpu(1).uuid}


@pytest.mark.parametrize(
    ("dropped", "gate"),
    [
        ("sharedCounters", "DRAPartitionableDevices"),
        ("consumesCounters", "DRAPartitionableDevices"),
        ("allowMultipleAllocations", "DRAConsumableCapacity"),
        ("requestPolicy", "DRAConsumableCapacity"),
        ("taints", "DRADeviceTaints"),
    ],
)
def test_a_dropped_field_names_its_gate(dropped: str, gate: str) -> None:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(each) for key, each in value.items() if key != dropped}
        return [without(each) for each in value] if isinstance(value, list) else value

    offered = offers(1, taints={SHARES: ((UNHEALTHY, "suspect"),)})
    sent = [each.body["spec"] for each in writes(NODE, None, contents(NODE, offered, None), {})]
    assert {gate for spec in sent for gate in missing_gates(spec, without(spec))} == {gate}
    assert all(not differences(spec, spec) for spec in sent)


def test_a_quantity_may_come_back_in_another_form() -> None:
    assert differences({"value": "1024Mi"}, {"value": "1Gi"}) == []
    assert differences({"a": {"value": "2Gi"}}, {"a": {"value": "1Gi"}}) == ["a.value"]


def test_groups_of_nvlinks() -> None:
    gpus = [gpu(index) for index in range(4)]
    pairs = {
        (gpus[0].uuid, gpus[2].uuid): 400,
        (gpus[2].uuid, gpus[3].uuid): 130,
        (gpus[0].uuid, gpus[1].uuid): 20,
    }
    topology = Topology.of([each.uuid for each in gpus], pairs)
    assert topology.nvlink_groups() == {gpus[at].uuid: 0 for at in (0, 2, 3)}


def test_a_long_node_name_makes_names_that_fit() -> None:
    for name in contents("n" * 253, offers(1), None):
        assert len(name) <= 253


def test_the_kubelets_record_says_how_much_a_share_is() -> None:
    uuid = "GPU-AB2CF087-86f3-7a43-b711-4771313afc50"
    kind = "gpu-node-agent.io/share"
    cdi = [f"{kind}=mps-core-5", f"{kind}=mps-memory-6", f"{kind}=mps-{uuid}", f"{kind}=mps-core-30"]
    share = share_of(
        device_name(uuid, SHARES), [*cdi, f"{kind}=mps-memory-8", f"{kind}=mps-priority-low"], "c"
    )
    assert share
    assert (share.gpu, share.cores, share.memory, share.low_priority) == (uuid, 30, 8, True)
    assert share_of("gpu-1-frac", cdi) is None
    assert share_of("", ()) is None
