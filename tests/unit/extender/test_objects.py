"""The ledger's part of the API's nodes and pods, whatever is in them."""

import json
from typing import Any

import msgspec
import pytest

from agent.extender.free_capacity import HeldUnits
from agent.extender.objects import read_node, read_pod
from agent.extender.pod_demand import pod_demand
from agent.model.modes import Mode
from agent.model.node_inventory import INVENTORY
from agent.model.pod import VGPU, Container, Impossible, Pod
from tests.pods import a_pod

CORE, MEMORY = VGPU.core, VGPU.memory


def pod(**status: Any) -> bytes:
    limits = {CORE: "2", MEMORY: "1", "cpu": "500m"}
    return json.dumps(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"nodeName": "n", "containers": [{"name": "main", "resources": {"limits": limits}}]},
            "status": {"phase": "Running", **status},
        }
    ).encode()


def given(resource: str, *ids: str) -> dict[str, Any]:
    return {"name": resource, "resources": [{"resourceID": each, "health": "Healthy"} for each in ids]}


def statuses(*devices: dict[str, Any]) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "main", "allocatedResourcesStatus": list(devices)}]}


def test_what_the_kubelet_gave_is_taken_by_gpu() -> None:
    _, found = read_pod(pod(**statuses(given(CORE, "GPU-1::c4", "GPU-1::c9"), given(MEMORY, "GPU-1::m0"))))
    assert found is not None
    assert found.claim.held == (HeldUnits("GPU-1", Mode.VGPU, 2, 1, 1),)
    assert (found.node, found.claim.name) == ("n", "ns/p")


@pytest.mark.parametrize(
    "status",
    [
        {},
        statuses(given(CORE, "GPU-1::c4", "GPU-1::c9")),
        statuses(given(CORE, "GPU-1::c4"), given(MEMORY, "GPU-1::m0")),
        statuses(given(CORE, "nonsense", "GPU-1::x3"), given(MEMORY, "GPU-1::m0")),
        statuses(given("example.com/other", "GPU-1::c4", "GPU-1::c9"), given(MEMORY, "GPU-1::m0")),
    ],
)
def test_records_that_do_not_show_all_are_not_believed(status: dict[str, Any]) -> None:
    _, found = read_pod(pod(**status))
    assert found is not None
    assert found.claim.held is None


def test_pods_without_gpus_or_that_ended_hold_nothing() -> None:
    assert read_pod(b'{"metadata":{"uid":"u"},"spec":{"nodeName":"n"}}')[1] is None
    assert read_pod(pod(phase="Failed"))[1] is None


@pytest.mark.parametrize("text", ['{"v":7,"gpus":[]}', "[", '{"v":1}'])
def test_an_inventory_that_is_not_understood_is_told_and_totals_stay(text: str) -> None:
    node = {
        "metadata": {"name": "n", "uid": "u", "annotations": {INVENTORY: text}},
        "status": {"allocatable": {CORE: "1k", MEMORY: "half", "cpu": "7600m"}},
    }
    _, found = read_node(json.dumps(node).encode())
    assert found.inventory is None
    assert found.problem
    assert found.totals == {CORE: 1000}


def test_a_node_that_is_no_object_is_an_error_of_decoding() -> None:
    with pytest.raises(msgspec.DecodeError):
        read_node(b'{"metadata":7}')


def test_pods_of_one_shape_share_their_demand() -> None:
    def shaped(name: str) -> Pod:
        return a_pod("ns", name, (Container(name, {CORE: 30, MEMORY: 4, "example.com/x": 1}),))

    assert pod_demand(shaped("a")) is pod_demand(shaped("b"))
    with pytest.raises(Impossible, match="container mine asks for 150"):
        pod_demand(a_pod("ns", "p", (Container("mine", {CORE: 150}),)))
