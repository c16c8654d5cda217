"""The pod by which `try` asks for a share: which one, and its manifest."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.check.probe import SCRIPT
from agent.model.modes import OFFERED_MODES, Mode

NAME = "gpu-node-agent-try"
CONTAINER = "share"
CORES = 10  # percent of one GPU
MEMORY_BYTES = 2 << 30
# Beyond the deadline: the pod then ends by itself if nobody could take it away.
GRACE_SECONDS = 60


class NothingOffered(Exception):
    """No node offers the share to be tried; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """The user's choice; None: `try` chooses."""

    mode: Mode | None = None
    namespace: str = "default"
    node: str | None = None
    image: str | None = None
    runtime_class: str | None = None
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class TrialShare:
    mode: Mode
    limits: Mapping[str, int]

    def text(self) -> str:
        return ", ".join(f"{name}: {amount}" for name, amount in self.limits.items())


def share_of(mode: Mode, resource: str | None = None) -> TrialShare:
    """A small share; `resource` of a mode with several of its own."""
    if pair := mode.row.pair:
        return TrialShare(mode, {pair.core: CORES, pair.memory: MEMORY_BYTES // pair.block_bytes})
    return TrialShare(mode, {resource or next(iter(mode.resources), f"{mode.row.prefix}1g.18gb"): 1})


def choose(mode: Mode | None, allocatable: Iterable[Mapping[str, str]], where: str) -> TrialShare:
    """The first that one of the nodes offers. Raises NothingOffered."""
    offered = {name for node in allocatable for name, amount in node.items() if amount != "0"}
    for each in OFFERED_MODES if mode is None else (mode,):
        single = [resource for resource in each.row.single if resource in offered]
        single += sorted(name for name in offered if each.row.prefix and name.startswith(each.row.prefix))
        if single or (each.row.pair and offered.issuperset(each.resources)):
            return share_of(each, single[0] if single else None)
    wanted = " or ".join(
        " and ".join(each.resources[:2]) or f"{each.row.prefix}*"
        for each in ([mode] if mode else OFFERED_MODES)
    )
    word = (mode or OFFERED_MODES[0]).value
    raise NothingOffered(
        f"{wanted} is not on offer {where}; give a node the mode (kubectl label node NODE "
        f"nvidia-device-enable={word}) and wait for its condition GPUModeReady"
    )


def manifest(options: TrialOptions, share: TrialShare, own_image: str | None) -> dict[str, Any]:
    """A pod that Pod Security's level `restricted` admits, too. `own_image`: the agent's, without a shell."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image or own_image,
        "imagePullPolicy": "IfNotPresent",
        "resources": {"limits": {name: str(amount) for name, amount in share.limits.items()}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "runAsGroup": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if options.image:
        container["command"] = ["sh", "-c", SCRIPT]
    else:
        container["args"] = ["try", "--inside"]
    spec: dict[str, Any] = {
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": int(options.seconds) + GRACE_SECONDS,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    if options.node:
        # By the scheduler, which knows what is free: with spec.nodeName the kubelet would refuse the pod.
        field = {"key": "metadata.name", "operator": "In", "values": [options.node]}
        terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    metadata = {
        "name": f"{NAME}-{secrets.token_hex(4)}",
        "namespace": options.namespace,
        "labels": {"app.kubernetes.io/name": NAME},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
