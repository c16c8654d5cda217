"""A device that leaves its list while it is being handed out ends the real kubelet.

Therefore the agent keeps on its lists, as Unhealthy, all that it may be granting. The kubelet looks a device
up after the call, without a check (pkg/kubelet/cm/devicemanager/manager.go): should a newer one check, the
first test here fails, and the rule may go.
"""

from collections.abc import Iterator

import grpc
import pytest

from tests.cluster import processes
from tests.cluster.manifests import container, pod
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.component.kubelet.peer import Call, Plugin, pod_resources

RESOURCE = "example.test/left"
DEVICES = {"one": True, "two": True}
CALLS = ("Allocate", "GetPreferredAllocation")


def first(asked: Call) -> list[str]:
    return sorted(asked.ids)[: asked.size]


@pytest.fixture
def plugin(cluster: Cluster) -> Iterator[Plugin]:
    """A plugin of the real kubelet, which runs again when it has ended."""
    made = Plugin(cluster.kubelet_root / "plugins_registry" / "left.sock", RESOURCE, DEVICES)
    made.preferred = first
    try:
        with made.serving():
            until_healthy(cluster, *DEVICES)
            yield made
    finally:
        cluster.delete("Pod", "left", grace_seconds=0)
        cluster.restart_kubelet()
        cluster.wait_node_ready()


def until_healthy(cluster: Cluster, *wanted: str) -> None:
    """Wait until the kubelet has a list with these devices Healthy and no others."""

    def seen() -> None:
        try:
            with pod_resources(cluster.podresources_socket) as client:
                now = sorted(one for resource, one in client.allocatable() if resource == RESOURCE)
        except grpc.RpcError as error:  # a kubelet that has just started
            raise NotYet(f"{error}") from error
        if now != sorted(wanted):
            raise NotYet(f"{now}")

    eventually(seen, timeout=30, what=f"healthy for the kubelet: {wanted}", interval=0.2)


def hand_out(cluster: Cluster, plugin: Plugin, call: str, then: dict[str, bool]) -> None:
    """Have the kubelet ask for a device; its list becomes another one while it waits for the answer."""

    def change() -> None:
        plugin.publish(then)
        until_healthy(cluster)

    def preferred(asked: Call) -> list[str]:
        change()
        return first(asked)

    if call == "Allocate":
        plugin.before_answer = change
    else:
        plugin.preferred = preferred
    cluster.apply(pod("left", container("main", limits={RESOURCE: 1}), nodeName=cluster.node))


@pytest.mark.parametrize("call", CALLS)
def test_kubelet_ends_by_a_device_that_left_its_list(cluster: Cluster, plugin: Plugin, call: str) -> None:
    kubelet = processes.identify(cluster.pid("kubelet"))
    assert kubelet is not None
    hand_out(cluster, plugin, call, {})
    assert processes.wait_gone([kubelet], 60)
    said = cluster.log_tail("kubelet", 400)
    assert "nil pointer dereference" in said
    assert "devicemanager" in said


@pytest.mark.parametrize("call", CALLS)
def test_kubelet_stays_where_it_is_listed_as_unhealthy(cluster: Cluster, plugin: Plugin, call: str) -> None:
    kubelet = processes.identify(cluster.pid("kubelet"))
    hand_out(cluster, plugin, call, dict.fromkeys(DEVICES, False))
    cluster.wait_pod("left")
    assert processes.identify(cluster.pid("kubelet")) == kubelet
