"""The interface of a node for scenarios: the seam between the scenario suite and the two kubelets.

The functions of `tests/scenarios/*.py` are written against `Rig` alone. One implementation drives the
embedded kubelet (`tests/component/embedded_rig.py`), one the real cluster (`tests/cluster/real_rig.py`), so
that the embedded kubelet cannot drift away from what a real one does.

What every rig provides before a scenario starts: one node with the simulated machine `dgx-h200` and
nothing running on it; the agent NOT started; no pod; a CDI folder with a spec of the kind
`nvidia.com/gpu` as NVIDIA's toolkit writes it (one device per GPU UUID with the node /dev/nvidia<minor>, the
common nodes /dev/nvidiactl and /dev/nvidia-uvm, and `NVIDIA_VISIBLE_DEVICES=void` for all).

What every rig does with a pod: plain init containers and `exits` containers end by themselves with 0 after
their `seconds`, all others run until deletion. Each container reports its environment and device nodes when
it starts (a real one prints both into its log), so that they can be asked for after it has ended, too.

Deadlines are seconds. A wait that reaches its deadline raises TimeoutError with a sentence that says
what was seen last.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from agent.simulator.machine import SimulatedMachine

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class NodeView:
    """The state by the Node object."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    conditions: Mapping[str, tuple[str, str, str]]  # type -> status, reason, message
    taints: frozenset[str]  # keys


@dataclass(frozen=True, slots=True)
class Claimed:
    """A device of a container's claim, by PodResources."""

    claim: str
    device: str
    share: str | None


class Rig(Protocol):
    """One node with its kubelet, its simulated GPUs and the agent under test."""

    node_name: str
    kubelet_root: Path
    cdi_folder: Path
    wiping_seconds: float  # from the end of a DRA driver to that of its slices
    watch_seconds: float  # in which its kubelet reports the node's status several times

    # The machine under the agent, for faults and for what is true about its GPUs.
    machine: SimulatedMachine

    # The agent: the real program, a process of its own.
    async def start_agent(self, settings: Mapping[str, object] | None = None) -> None:
        """Start the agent; return once its process runs (not once it is ready).

        `settings` are configuration keys by path (`{"injection.strategy": "envvar"}`) over the rig's own:
        default mode pgpu, and the folders of this node.
        """

    async def api_access(self) -> Mapping[str, object]:
        """Settings that give the agent the API of this node; without them it has none."""

    async def kill_agent(self) -> None:
        """SIGKILL; return once the process is gone."""

    async def stop_agent(self, deadline: float = 10.0) -> int:
        """SIGTERM; the exit code. TimeoutError if it does not end."""

    def agent_running(self) -> bool:
        """Whether the agent's process is alive."""

    def record_lists(self) -> Path:
        """From its next start on the agent writes down the lists it sends, for `tests.scenarios.lists`."""

    def agent_log(self) -> Path:
        """The agent's output, of all its lives: JSON lines."""

    # The node.
    async def allocatable(self, resource: str = GPU) -> int | None:
        """`status.allocatable` of the node, as the API has it; None: the node has no such key."""

    async def capacity(self, resource: str = GPU) -> int | None:
        """`status.capacity` of the node; None: the node has no such key."""

    async def wait_allocatable(self, count: int, resource: str = GPU, deadline: float = 30.0) -> None:
        """Wait until allocatable is exactly `count`."""

    async def known_devices(self, resource: str = GPU) -> int:
        """Devices that the kubelet may hand out, held ones included; the status may be ahead or behind."""

    def watching_allocatable(self, resource: str = GPU) -> AbstractAsyncContextManager[Sequence[int | None]]:
        """Inside: a growing list of the values that allocatable took, the present one first.

        Every value that the node's status held must show, however short (a watch, not a poll).
        """

    async def set_labels(self, labels: Mapping[str, str | None]) -> None:
        """Set labels of the Node object, as an administrator does; None removes one."""

    async def node(self) -> NodeView:
        """The Node object now."""

    async def event_reasons(self) -> Sequence[str]:
        """Reasons of the events about the node, oldest first."""

    def api_server_away(self) -> AbstractAsyncContextManager[None]:
        """Inside, no call to the API server succeeds, nor does one of this rig that needs it."""

    async def restart_kubelet(self, down_seconds: float = 0.0) -> None:
        """Stop the kubelet, wait, start it; pods run on.

        Return once PodResources' GetAllocatableResources shows as many devices as before: a pod that
        comes earlier is refused by every kubelet, because the node's status still has the old figures.
        """

    def gpu_uuids(self) -> tuple[str, ...]:
        """UUIDs of the machine's GPUs by index."""

    def device_node(self, uuid: str) -> str:
        """The node of a GPU as a container names it: `/dev/nvidia3`."""

    # Pods.
    async def create_pod(self, pod: PodSpec) -> None:
        """Hand the pod to the API (bound already where `node_name` is set); any node name means this node."""

    async def delete_pod(self, pod: PodSpec, deadline: float = 30.0) -> None:
        """Delete without grace and wait until the pod is gone, its containers included."""

    async def phase(self, pod: PodSpec) -> Phase:
        """`status.phase` now."""

    async def all_pods(self) -> Mapping[str, tuple[Phase, str, str]]:
        """Phase, `status.reason` and `status.message` of every pod of the namespace `default`, by name."""

    async def ask_to_delete(self, pod: PodSpec) -> None:
        """Delete without waiting for the end; a pod that is gone already is no error."""

    async def wait_phase(self, pod: PodSpec, phase: Phase, deadline: float = 30.0) -> None:
        """Wait until the pod is in that phase; AssertionError at once if it ends in another final phase."""

    async def wait_running(self, pod: PodSpec, container: str, deadline: float = 30.0) -> None:
        """Wait until a container's process is there, an init container's, too."""

    async def reason(self, pod: PodSpec) -> str:
        """`status.reason`; of an unscheduled pod that of its PodScheduled condition; else empty."""

    async def message(self, pod: PodSpec) -> str:
        """The text that goes with `reason`."""

    async def held_ids(self, pod: PodSpec, container: str, resource: str = GPU) -> frozenset[str]:
        """Device IDs of a container by the kubelet's PodResources `Get`; empty for plain init containers."""

    async def container_environment(self, pod: PodSpec, container: str) -> Mapping[str, str]:
        """The environment that the container's first process was started with."""

    async def container_device_nodes(self, pod: PodSpec, container: str) -> frozenset[str]:
        """Paths of NVIDIA's device nodes inside the container (`/dev/nvidia0`, `/dev/nvidiactl`, ...)."""

    async def container_pid(self, pod: PodSpec, container: str) -> int:
        """PID of a process of a running container, as the agent can look it up; the same one each time."""

    # Claims (DRA).
    async def create_resource(self, kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create an object of resource.k8s.io/v1, to be deleted after the scenario; as the API stored it."""

    async def resources(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """All objects of that kind; of the namespace `default` where they have one."""

    async def annotate_pod(self, pod: PodSpec, key: str, value: str) -> None:
        """Set an annotation of a pod."""

    async def claimed(self, pod: PodSpec, container: str) -> Sequence[Claimed]:
        """Devices of a container's claims by the kubelet's PodResources `Get`."""
