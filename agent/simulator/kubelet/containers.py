"""The view of a container: plugin answers, the pod's own environment and CDI edits, merged.

Order, seen on kubelet 1.36 with containerd 2: the plugins' environment and mounts first, the pod's own
environment over them, CDI edits over all.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import yaml

from agent._proto.v1beta1 import ContainerAllocateResponse

from .pod_specs import ContainerSpec

logger = structlog.get_logger()
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
COMMON_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")


class ContainerRefused(Exception):
    """The runtime cannot create the container."""


@dataclass(slots=True)
class ContainerView:
    """A container as its process sees it; nodes and mounts: path in the container -> path on the host."""

    env: dict[str, str] = field(default_factory=dict)
    device_nodes: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Runtime:
    """The container runtime.

    `cdi_folder`: where CDI specs lie. `nvidia_nodes`: where the default runtime is NVIDIA's, the device
    node of each GPU by UUID: such a runtime obeys NVIDIA_VISIBLE_DEVICES, from pod or agent.
    """

    cdi_folder: Path
    nvidia_nodes: Mapping[str, str] | None = None

    def create(
        self,
        container: ContainerSpec,
        responses: Collection[ContainerAllocateResponse],
        claimed: Collection[str] = (),
    ) -> ContainerView:
        """Blocks on the CDI files; `claimed`: CDI devices of its claims. Raises ContainerRefused."""
        view = _merge(responses)
        view.cdi_devices = tuple(dict.fromkeys((*view.cdi_devices, *claimed)))
        view.env |= container.env
        if view.cdi_devices:
            self._inject(view)
        if self.nvidia_nodes is not None:
            for node in self._visible(view.env.get(VISIBLE_DEVICES, "")):
                view.device_nodes.setdefault(node, node)
        return view

    def _inject(self, view: ContainerView) -> None:
        known = dict(_cdi_devices(self.cdi_folder))
        unknown = [name for name in view.cdi_devices if name not in known]
        if unknown:
            raise ContainerRefused(
                f"CDI device injection failed: unresolvable CDI devices {', '.join(unknown)}"
            )
        for name in view.cdi_devices:
            for edits in known[name]:
                view.env |= dict(_split(assignment) for assignment in edits.get("env") or ())
                for node in edits.get("deviceNodes") or ():
                    view.device_nodes[node["path"]] = node.get("hostPath", node["path"])
                for mount in edits.get("mounts") or ():
                    view.mounts[mount["containerPath"]] = mount["hostPath"]

    def _visible(self, value: str) -> tuple[str, ...]:
        nodes = self.nvidia_nodes or {}
        if value in ("", "void", "none"):
            return ()
        if value == "all":
            chosen = tuple(nodes.values())
        else:
            by_index = dict(enumerate(nodes.values()))
            wanted = value.split(",")
            chosen = tuple(nodes.get(w) or by_index[int(w)] for w in wanted if w in nodes or w.isdigit())
        return (*chosen, *COMMON_NODES)


def _merge(responses: Collection[ContainerAllocateResponse]) -> ContainerView:
    """Several plugins' answers for one container: the first to name a thing wins, others are logged."""
    view = ContainerView()
    cdi: dict[str, None] = {}
    for response in responses:
        for known, added in (
            (view.env, response.envs),
            (view.device_nodes, {each.container_path: each.host_path for each in response.devices}),
            (view.mounts, {each.container_path: each.host_path for each in response.mounts}),
            (view.annotations, response.annotations),
        ):
            for key, value in added.items():
                if known.setdefault(key, value) != value:
                    logger.warning("conflicting_setting", key=key, kept=known[key], dropped=value)
        cdi |= dict.fromkeys(device.name for device in response.cdi_devices)
    view.cdi_devices = tuple(cdi)
    return view


def _cdi_devices(folder: Path) -> Iterator[tuple[str, tuple[Mapping[str, Any], ...]]]:
    """Full name of each device and its edits: those of the whole spec first, then its own."""
    if not folder.is_dir():
        return
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.yaml"))):
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
        common = spec.get("containerEdits") or {}
        for device in spec["devices"]:
            yield f"{spec['kind']}={device['name']}", (common, device.get("containerEdits") or {})


def _split(assignment: str) -> tuple[str, str]:
    name, _, value = assignment.partition("=")
    return name, value
