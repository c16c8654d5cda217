"""An uninstall that can be interrupted half-way: one node is clean by then, another does not answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent.cleanup.request import REPORT, CleanupState
from agent.mps.processes import Process, identify
from tests.cluster import made_up
from tests.cluster.installation import MODE_LABEL, NAMESPACE, Installation
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually


@contextmanager
def second_node(installation: Installation) -> Iterator[None]:
    """A node without a kubelet: an agent's pod is meant for it, and never answers."""
    cluster, name = installation.cluster, "node2"
    made_up.node(cluster, name)
    cluster.api.merge_patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {MODE_LABEL: "mixed"}}})

    def there() -> dict[str, Any]:
        for pod in installation.pods("agent"):
            if pod["spec"].get("nodeName") == name:
                return pod
        raise NotYet("no agent's pod on the second node")

    eventually(there, timeout=20, what="an agent's pod is bound to the second node")
    # The hook's own pod must not come here.
    cluster.api.merge_patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        cluster.delete("Node", name)
        for pod in installation.pods("agent"):
            if pod["spec"].get("nodeName") == name:
                cluster.delete("Pod", pod["metadata"]["name"], namespace=NAMESPACE, grace_seconds=0)


def wait_cleaned(installation: Installation) -> None:
    """Wait until the agent has cleaned up and said so, out of service."""

    def cleaned() -> None:
        found = installation.cluster.get("Node", installation.cluster.node)["metadata"]["annotations"]
        report = json.loads(found.get(REPORT, "{}"))
        if report.get("state") != CleanupState.CLEAN:
            raise NotYet(f"{report}; {installation.agent_log()}")

    eventually(cleaned, timeout=40, what="the agent reports a clean node", interval=0.2)
    assert not installation.cluster.get("Node", installation.cluster.node)["metadata"]["labels"].keys() & {
        "gpu-node-agent.io/mode"
    }


def hook_process(cluster: Cluster) -> Process:
    """The hook's program in its container."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            ours = entry.name.isdigit() and cluster.cgroup in (entry / "cgroup").read_text()
            if ours and b"cleanup\0cluster\0" in (entry / "cmdline").read_bytes():
                found = identify(int(entry.name))
                assert found
                return found
    raise AssertionError("no process of the hook")
