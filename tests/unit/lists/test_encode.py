"""The bytes of device lists, read back by betterproto2 and by Google's protobuf."""

import pytest

from agent._proto import v1beta1
from agent.kubelet import wire
from tests.component import protos

GOOGLE = protos.load("deviceplugin")


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("numa", [None, 0, 1, 300])
@pytest.mark.parametrize("device_id", ["", "a", "GPU-d2e6f43f-ca99-5ade-86aa-0f9787dfaf06::sm140", "é" * 30])
def test_one_device(device_id: str, healthy: bool, numa: int | None) -> None:
    health = "Healthy" if healthy else "Unhealthy"
    topology = None if numa is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa)])
    data = wire.device(device_id, healthy, numa)
    (ours,) = v1beta1.ListAndWatchResponse.parse(data).devices
    assert ours == v1beta1.Device(id=device_id, health=health, topology=topology)
    (theirs,) = GOOGLE.ListAndWatchResponse.FromString(data).devices
    assert (theirs.ID, theirs.health) == (device_id, health)
    assert theirs.HasField("topology") is (numa is not None)
    assert [node.ID for node in theirs.topology.nodes] == ([] if numa is None else [numa])


def test_a_list_is_the_concatenation_of_its_devices() -> None:
    parts = [("a", True, None), ("b", False, 1), ("c", True, 0)]
    whole = v1beta1.ListAndWatchResponse.parse(b"".join(wire.device(*part) for part in parts))
    assert [one.id for one in whole.devices] == ["a", "b", "c"]
    assert bytes(whole) == b"".join(wire.device(*part) for part in parts)


@pytest.mark.parametrize("healthy", [True, False])
def test_many_devices_by_hand_are_the_same_bytes(healthy: bool) -> None:
    ids = [
        "x",
        *(f"GPU-d2e6f43f-ca99-5ade-86aa-0f9787dfaf06::c{number}" for number in range(1200)),
        "y" * 63,
    ]
    assert wire.devices(ids, healthy) == b"".join(wire.device(one, healthy, None) for one in ids)
    assert wire.devices([], healthy) == b""
