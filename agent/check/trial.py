"""`gpu-node-agent try`: a pod asks for a share, lists its devices, and is taken away in any case."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from agent.check.pod_objects import ShownPod, ShownPods, reasons_of
from agent.check.probe import DEVICE, DRIVER_PROGRAM, NO_PROGRAM, SCRIPT
from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi
from agent.cluster.node import ApiNode, NodeList
from agent.model.modes import OFFERED_MODES, Mode
from agent.node.conditions import SIMULATED_LABEL

# The pod by which `try` asks for a share: which one, and its manifest.

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


Say = Callable[[str], None]

POLL_SECONDS = 0.5
DELETE_SECONDS = 10.0
MOST_LOG_BYTES = 64 << 10
LIST_SECONDS = 30.0
AGENTS = "app.kubernetes.io/name=gpu-node-agent,app.kubernetes.io/component=agent"
FORBIDDEN, NOT_FOUND, SERVER_ERROR = 403, 404, 500
FINAL = ("Succeeded", "Failed")
# A registry that is slow to answer says so, too, and then brings the image all the same.
HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")


class TrialFailed(Exception):
    """The trial could not run, or its container saw no GPU; the text says why."""


async def attempt(api: KubeApi, options: TrialOptions, say: Say) -> None:
    """Try it, line by line. Raises TrialFailed, ApiError."""
    nodes = await _nodes(api, options)
    share = _share(options, nodes)
    image = None if options.image else await _agents_image(api, options.node)
    pod = manifest(options, share, image)
    name = pod["metadata"]["name"]
    path = f"/api/v1/namespaces/{options.namespace}/pods/{name}"
    say(f"pod {options.namespace}/{name} asks for {share.text()} (mode {share.mode.value})")
    there = True
    try:
        # Not to be given up half-way: whether there is a pod to take away would not be known.
        with anyio.CancelScope(shield=True):
            try:
                await api.post(path.rpartition("/")[0], pod)
            except ApiRefused as error:
                there = error.status >= SERVER_ERROR  # it may have been written before that
                raise
        ended = await _ended(api, path, options.seconds, say)
        query = {"container": CONTAINER, "limitBytes": f"{MOST_LOG_BYTES}"}
        text = (await api.get(f"{path}/log", query)).decode(errors="replace")
    finally:
        if there:
            with anyio.CancelScope(shield=True):
                await _take_away(api, path, say)
    lines = text.splitlines()
    for line in lines:
        say(f"  {line}")
    for key, value in sorted(ended.metadata.annotations.items()):
        if key.startswith(("gpu-node-agent.io/", "tencent.com/")):
            say(f"  annotation: {key}={value}")
    node = next((each for each in nodes or () if each.metadata.name == ended.spec.node_name), None)
    say(_verdict(ended, lines, simulated=node is not None and SIMULATED_LABEL in node.metadata.labels))


def _verdict(ended: ShownPod, lines: Sequence[str], *, simulated: bool) -> str:
    """The outcome. Raises TrialFailed."""
    where = f"on node {ended.spec.node_name}"
    devices = [line.removeprefix(DEVICE) for line in lines if line.startswith(DEVICE)]
    program = next((line for line in reversed(lines) if line.startswith(DRIVER_PROGRAM)), None)
    if ended.status.phase != "Succeeded" or program is None:
        raise TrialFailed(f"the container {where} did not do what it is for: {reasons_of(ended.status)}")
    if simulated:
        return f"the share was given {where}; its GPUs are simulated, so the container has no device"
    if not devices:
        raise TrialFailed(
            f"the share was given {where}, but the container has no device of NVIDIA's: docs/injection.md; "
            "on the node, gpu-node-agent check node says what is missing"
        )
    answer = program.removeprefix(DRIVER_PROGRAM)
    if answer == NO_PROGRAM:
        return f"the share was given {where}: {len(devices)} devices; the driver brings no nvidia-smi to run"
    if answer != "ended with 0":
        raise TrialFailed(f"the share was given {where}, but nvidia-smi {answer}")
    return f"the share was given {where}: {len(devices)} devices, and nvidia-smi ran"


async def _nodes(api: KubeApi, options: TrialOptions) -> list[ApiNode] | None:
    """All nodes, or the one that is to be tried; None: this account may not list them."""
    query = {"fieldSelector": f"metadata.name={options.node}"} if options.node else None
    try:
        return (await api.read("/api/v1/nodes", NodeList, query, LIST_SECONDS)).items
    except ApiRefused as error:
        if error.status == FORBIDDEN:
            return None
        raise


def _share(options: TrialOptions, nodes: list[ApiNode] | None) -> TrialShare:
    if nodes is None:
        if options.mode is None:
            raise TrialFailed(
                "this account may not list nodes, so that no mode can be chosen: name one (--mode)"
            )
        return share_of(options.mode)
    if options.node and not nodes:
        raise TrialFailed(f"there is no node {options.node}")
    try:
        where = f"on node {options.node}" if options.node else "on any node"
        return choose(options.mode, (each.status.allocatable for each in nodes), where)
    except NothingOffered as error:
        raise TrialFailed(str(error)) from error


async def _agents_image(api: KubeApi, node: str | None) -> str:
    """The image of an agent that runs: the nodes that offer GPUs have it. Raises TrialFailed."""
    remedy = "name an image with a shell (--image)"
    try:
        found = await api.read("/api/v1/pods", ShownPods, {"labelSelector": AGENTS}, LIST_SECONDS)
    except ApiRefused as error:
        if error.status != FORBIDDEN:
            raise
        raise TrialFailed(f"this account may not look for the agents and their image: {remedy}") from error
    for pod in sorted(found.items, key=lambda each: each.spec.node_name != node):
        for container in pod.spec.containers:
            if container.name == "agent" and container.image:
                return container.image
    raise TrialFailed(f"no agent of this product runs in the cluster, whose image would serve: {remedy}")


async def _ended(api: KubeApi, path: str, seconds: float, say: Say) -> ShownPod:
    """The pod once it has ended. Raises TrialFailed after `seconds`, or as soon as waiting is of no use."""
    last = ""
    with anyio.move_on_after(seconds):
        while True:
            try:
                pod = await api.read(path, ShownPod)
            except ApiUnavailable as error:
                last = str(error)
                await anyio.sleep(POLL_SECONDS)
                continue
            status = pod.status
            if status.phase in FINAL and status.container_statuses:
                return pod
            if status.phase in FINAL:  # the kubelet did not take it in
                raise TrialFailed(f"node {pod.spec.node_name} refused the pod: {reasons_of(status)}")
            reasons = reasons_of(status)
            if reasons != last:
                say(f"  pod: {reasons}")
                last = reasons
            if any(reason in reasons for reason in HOPELESS):
                raise TrialFailed(f"the container cannot start: {reasons}")
            await anyio.sleep(POLL_SECONDS)
    raise TrialFailed(f"after {seconds:g} s the pod has not ended: {last}; docs/troubleshooting.md")


async def _take_away(api: KubeApi, path: str, say: Say) -> None:
    """Delete it, and wait until it is gone, but not for ever."""
    _, _, _, _, namespace, _, name = path.split("/")
    problem, asked = f"it is still there after {DELETE_SECONDS:g} s", False
    with anyio.move_on_after(DELETE_SECONDS):
        while True:
            try:
                if not asked:
                    await api.delete(path, {"gracePeriodSeconds": "1"})
                    asked = True
                await api.get(path)
            except ApiRefused as error:
                if error.status == NOT_FOUND:
                    return
                problem = str(error)
                if error.status < SERVER_ERROR:
                    break
            except ApiError as error:
                problem = str(error)
            await anyio.sleep(POLL_SECONDS)
    say(f"the pod could not be taken away ({problem}): kubectl -n {namespace} delete pod {name}")
