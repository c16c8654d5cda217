"""The CDI specification of the node's GPUs as a value: its checks, and devices that a newer one keeps.

Format: CDI specification 0.5 and newer (`kind`, `devices[].name`, `containerEdits`), as written by
`nvidia-ctk cdi generate`. Its edits are NVIDIA's and pass through unread.
"""

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

VENDOR, CLASS = "gpu-node-agent.io", "gpu"
# Never nvidia.com/gpu: a device name that stands in two files of one folder is lost in both.
KIND = f"{VENDOR}/{CLASS}"
FILE = "gpu-node-agent-gpus.json"
LIMITS_HOOK = "apply-cuda-memory-limits"  # of nvidia-cdi-hook, from 1.20.1


class CdiError(Exception):
    """The specification cannot be made, or is not usable; the message names the remedy."""


class BadSpecification(CdiError):
    """A specification that container runtimes would refuse, or that is not ours."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Which GPUs containers can get by the file, by UUID, and why it is not as it should be."""

    names: frozenset[str] = frozenset()
    problem: str | None = None
    # Those with NVIDIA's hook for the driver's memory limits (`agent.vgpu.memory_limits`).
    limiting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Specification:
    content: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(device["name"] for device in self.content["devices"])

    @property
    def limiting(self) -> frozenset[str]:
        """Names of the devices that carry NVIDIA's hook for the driver's memory limits."""
        return frozenset(device["name"] for device in self.content["devices"] if _limits_memory(device))

    def encoded(self) -> bytes:
        return json.dumps(self.content, separators=(",", ":")).encode()

    def keeping(self, before: "Specification | None", named: AbstractSet[str] | None) -> "Specification":
        """With the devices of `before` that this one lacks and containers still name; None: not known which.

        The kubelet repeats the names of a container that it restarts, and the runtime starts none with a
        name that it cannot resolve, be the GPU back by then or not.
        """
        if before is None:
            return self
        own = self.names
        kept = [
            device
            for device in before.content["devices"]
            if device["name"] not in own and (named is None or device["name"] in named)
        ]
        return Specification({**self.content, "devices": [*self.content["devices"], *kept]}) if kept else self

    def beside(self, other: "Specification", names: Sequence[str]) -> "Specification":
        """With the edits of `other`'s devices of these names for each container with a device of this one."""
        edits = dict(self.content.get("containerEdits", {}))
        found = [each["containerEdits"] for each in other.content["devices"] if each["name"] in names]
        for each in (other.content.get("containerEdits", {}), *found):
            for key, values in each.items():
                before = edits.get(key, [])
                edits[key] = [*before, *(value for value in values if value not in before)]
        return Specification({**self.content, "containerEdits": edits})


def _limits_memory(device: Mapping[str, Any]) -> bool:
    hooks = device["containerEdits"].get("hooks")
    return isinstance(hooks, list) and any(
        isinstance(hook, dict) and isinstance(hook.get("args"), list) and LIMITS_HOOK in hook["args"]
        for hook in hooks
    )


def parse(text: bytes) -> Specification:
    """A specification of the GPUs. Raises BadSpecification."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSpecification(f"the specification is no JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cdiVersion"), str):
        raise BadSpecification("the specification has no cdiVersion")
    if content.get("kind") != KIND:
        raise BadSpecification(f"the specification is of kind {str(content.get('kind'))[:80]}, not {KIND}")
    devices = content.get("devices")
    if not isinstance(devices, list) or not devices:
        raise BadSpecification("the specification names no device")
    for device in devices:
        if (
            not isinstance(device, dict)
            or not isinstance(device.get("name"), str)
            or not isinstance(device.get("containerEdits"), dict)
        ):
            raise BadSpecification("the specification has a device without a name or edits")
    return Specification(content)
