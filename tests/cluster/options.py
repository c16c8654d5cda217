"""The options of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Defaults are for speed; a test of timing sets `status_tick` to what a production kubelet has (10 s)."""

    status_tick: float = 1.0
    """Seconds between two looks of the kubelet at its node status (nodeStatusUpdateFrequency)."""
    kubelet_config: Mapping[str, Any] = field(default_factory=dict)
    """Merged over the rig's KubeletConfiguration, key by key."""
    kubelet_flags: tuple[str, ...] = ()
    apiserver_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    private_network: bool = False
    """Give the cluster a network of its own, where a pod on the node's network reaches the API server."""
    pod_network: bool = False
    """Wire every other pod to that network, too, with an address of its own; needs `private_network`."""
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    """Merged over the rig's KubeSchedulerConfiguration; extenders go here."""
