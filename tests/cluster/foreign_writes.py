"""Writes that policies must refuse to accounts that RBAC lets write the object."""

from typing import Any

from agent.node.capacity import TAINT
from tests.cluster.rig import NODE

OTHER = "node2"
OWN_LABEL = {"metadata": {"labels": {"gpu-node-agent.io/probe": "1"}}}
FOREIGN: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (OTHER, "", OWN_LABEL, "may change that node only, not node2"),
    (OTHER, "/status", {"status": {"capacity": {"nvidia.com/gpu": "8"}}}, "may change that node only"),
    (NODE, "", {"metadata": {"labels": {"pool": "mine"}}}, "only its own labels"),
    (NODE, "", {"metadata": {"labels": {"nvidia-device-enable": "pgpu"}}}, "only its own labels"),
    (NODE, "", {"metadata": {"labels": {"kubernetes.io/os": None}}}, "only its own labels"),
    (NODE, "", {"metadata": {"annotations": {"example.com/a": "b"}}}, "only annotations gpu-node-agent.io/"),
    (NODE, "", {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}, "may not change a node's spec"),
    (NODE, "", {"spec": {"taints": [{"key": TAINT, "effect": "NoExecute"}]}}, "may not change a node's spec"),
    (NODE, "", {"spec": {"unschedulable": True}}, "may not change a node's spec"),
    (NODE, "/status", {"status": {"allocatable": {"cpu": "1k"}}}, "own resources in a node's allocatable"),
    (NODE, "/status", {"status": {"capacity": {"example.com/x": "1"}}}, "own resources in a node's capacity"),
    (NODE, "/status", {"status": {"conditions": []}}, "only the condition GPUModeReady"),
    (NODE, "/status", {"status": {"addresses": []}}, "not addresses"),
    (NODE, "/status", {"status": {"nodeInfo": {"kubeletVersion": "v1.0.0"}}}, "not addresses, versions"),
    (NODE, "/status", {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}, "not addresses"),
    (NODE, "/status", {"status": {"volumesInUse": ["a"]}}, "only capacity, allocatable and one condition"),
    (NODE, "", {"metadata": {"finalizers": ["example.com/stay"]}}, "its finalizers"),
    (NODE, "/status", {"metadata": {"labels": {"pool": "mine"}}}, "only its own labels"),
)
"""Of the agent: node, part of it, patch, what the refusal says."""

OF_A_NODE: tuple[dict[str, Any], ...] = (
    {"metadata": {"annotations": {"gpu-node-agent.io/state": "{}"}}},
    {"metadata": {"annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": None}}},
    {"metadata": {"labels": {"gpu-node-agent.io/mode": "mps"}}},
    {"metadata": {"finalizers": ["example.com/stay"]}},
    {"spec": {"unschedulable": True}},
    {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}},
)
"""Of the clean-up hook, as are those of the record in which helm keeps the release."""

OF_THE_RECORD: tuple[dict[str, Any], ...] = (
    {"data": {"release": "SDRzSQ=="}},
    {"stringData": {"more": "x"}},
    {"immutable": True},
    {"metadata": {"labels": {"owner": "me"}}},
    {"metadata": {"labels": {"name": None}}},
    {"metadata": {"annotations": {"a": "b"}}},
    {"metadata": {"finalizers": ["example.com/stay"]}},
)
