"""An embedded kubelet: the agent's peer in the demo and in most tests."""

from .api_server import Pod
from .containers import ContainerView
from .embedded import EmbeddedKubelet
from .pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from .timings import Timings

__all__ = [
    "ContainerSpec",
    "ContainerView",
    "EmbeddedKubelet",
    "Phase",
    "Pod",
    "PodClaim",
    "PodSpec",
    "Timings",
]
