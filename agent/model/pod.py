"""Pods as the API server shows them, and what their containers ask for of a pair of resources."""

import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import msgspec

from agent.model.modes import PAIRS, Mode, ResourcePair, units

# A pod as the API server shows it: what its containers ask for, and what is judged of it.

# Metadata of Kubernetes objects, as far as the agent reads them.


class OwnerReference(msgspec.Struct, rename="camel", frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    owner_references: list[OwnerReference] = msgspec.field(default_factory=list)
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


# Sentences without names of pods, for those who may read the sentence and not the pods: pure.

POD = "<pod>"
# namespace/name, and both in a path of the API server.
_NAME = re.compile(
    r"(?<=/namespaces/)[^/\s]+/pods/[^/\s:,;]+|(?<![\w./:-])[a-z0-9][-a-z0-9]*/[a-z0-9](?:[-.a-z0-9]*[a-z0-9])?(?![\w/])"
)
_LIST = re.compile(rf"{POD}(?:, {POD})*(?: and (\d+) more)?")
_TWICE = re.compile(r"(\d+ pod\(s\) to end): \d+ pods?")  # the number stands before the list


def without_pods(text: str) -> str:
    """A sentence on one line, `<pod>` in the place of each name."""
    return _NAME.sub(POD, " ".join(text.split()))


def pods_counted(text: str) -> str:
    """A sentence on one line, `3 pods` in the place of a list of names."""
    return _TWICE.sub(r"\1", _LIST.sub(_count, without_pods(text)))


def _count(found: re.Match[str]) -> str:
    count = found[0].count(POD) + int(found[1] or 0)
    return f"{count} pod{'s' if count > 1 else ''}"


FINISHED = ("Succeeded", "Failed")


class Stage(Enum):
    """When a container of a pod runs."""

    INIT = "init"  # ends before the app containers start: the kubelet hands its units on to them
    SIDECAR = "sidecar"  # an init container with restartPolicy Always
    APP = "app"


@dataclass(frozen=True, slots=True)
class Container:
    """A container and its limits, counted in whole units of extended resources."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    stage: Stage = Stage.APP


class ClaimReference(msgspec.Struct, frozen=True):
    """A claim of the pod's that a container uses, or one request of it."""

    name: str
    request: str = ""


class Requirements(msgspec.Struct, frozen=True):
    """ResourceRequirements; quantities as text."""

    limits: dict[str, str] = msgspec.field(default_factory=dict)
    claims: list[ClaimReference] = msgspec.field(default_factory=list)


class PodClaimReference(msgspec.Struct, rename="camel", frozen=True):
    """A claim of a pod, by the pod's name for it; one of a template has its name in the pod's status."""

    name: str
    resource_claim_name: str | None = None


class Capabilities(msgspec.Struct, frozen=True):
    """Beyond those that the container runtime gives everybody."""

    add: list[str] = msgspec.field(default_factory=list)


class SecurityContext(msgspec.Struct, rename="camel", frozen=True):
    """SecurityContext of a pod or of a container; the container's wins."""

    run_as_user: int | None = None
    run_as_non_root: bool | None = None
    privileged: bool | None = None
    capabilities: Capabilities | None = None


class VolumeMount(msgspec.Struct, rename="camel", frozen=True):
    name: str
    mount_path: str


class HostPath(msgspec.Struct, frozen=True):
    path: str


class Volume(msgspec.Struct, rename="camel", frozen=True):
    """A volume of a pod; of other kinds nothing is read."""

    name: str
    host_path: HostPath | None = None


class ContainerSpec(msgspec.Struct, rename="camel", frozen=True):
    name: str
    resources: Requirements = Requirements()
    restart_policy: str | None = None  # "Always" makes an init container a sidecar
    security_context: SecurityContext | None = None
    volume_mounts: list[VolumeMount] = msgspec.field(default_factory=list)


class PodSpec(msgspec.Struct, rename="camel", frozen=True):
    containers: list[ContainerSpec] = msgspec.field(default_factory=list)
    init_containers: list[ContainerSpec] = msgspec.field(default_factory=list)
    node_name: str = ""
    security_context: SecurityContext | None = None
    volumes: list[Volume] = msgspec.field(default_factory=list)
    host_pid: bool = msgspec.field(default=False, name="hostPID")
    resource_claims: list[PodClaimReference] = msgspec.field(default_factory=list)


class ContainerRunning(msgspec.Struct, frozen=True):
    """Of a container that runs; nothing of it is read."""


class ContainerState(msgspec.Struct, frozen=True):
    running: ContainerRunning | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """A container that was created; `container_id` with its runtime's scheme, `containerd://...`."""

    name: str
    container_id: str = msgspec.field(default="", name="containerID")
    state: ContainerState = ContainerState()


class ExtendedResourceRequest(msgspec.Struct, rename="camel", frozen=True):
    """A resource of a container that a DRA driver provides: the kubelet asks no device plugin for it."""

    container_name: str
    resource_name: str
    request_name: str = ""


class ExtendedResourceClaim(msgspec.Struct, rename="camel", frozen=True):
    """PodExtendedResourceClaimStatus, Kubernetes 1.34 and later."""

    request_mappings: list[ExtendedResourceRequest] = msgspec.field(default_factory=list)
    resource_claim_name: str = ""


class PodStatus(msgspec.Struct, rename="camel", frozen=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    container_statuses: list[ContainerStatus] = msgspec.field(default_factory=list)
    init_container_statuses: list[ContainerStatus] = msgspec.field(default_factory=list)
    extended_resource_claim_status: ExtendedResourceClaim | None = None
    resource_claim_statuses: list[PodClaimReference] = msgspec.field(default_factory=list)


class Pod(msgspec.Struct, frozen=True, dict=True):
    """A pod; fields that are not named here are skipped while decoding."""

    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations

    @cached_property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        """In the order in which the kubelet admits them."""
        early = [
            Container(
                each.name,
                self.asked_of(each),
                Stage.SIDECAR if each.restart_policy == "Always" else Stage.INIT,
            )
            for each in self.spec.init_containers
        ]
        return (*early, *(Container(each.name, self.asked_of(each)) for each in self.spec.containers))

    @cached_property
    def ending(self) -> bool:
        """Whether deletion was asked for."""
        return self.metadata.deletion_timestamp is not None

    @property
    def started(self) -> bool:
        """Whether its kubelet has admitted it, or turned it away: its status has a start time."""
        return self.status.start_time is not None

    @property
    def init_devices(self) -> bool:
        """Whether plain init containers ask for devices, which PodResources never shows."""
        return any(each.stage is Stage.INIT and each.limits for each in self.containers)

    @cached_property
    def devices(self) -> bool:
        """Whether any container asks for devices."""
        return any(each.limits for each in self.containers)

    def container(self, name: str) -> Container | None:
        return next((each for each in self.containers if each.name == name), None)

    def starting(self, resource: str, size: int, *, over: bool = False) -> list[str]:
        """Containers that ask for so much of a resource and, as far as is known, do not run now.

        `over`: with init containers that have come to their end.
        """
        statuses = (*self.status.container_statuses, *self.status.init_container_statuses)
        running = {each.name for each in statuses if each.state.running}
        early = over or self.status.phase == "Pending"
        return [
            each.name
            for each in self.containers
            if each.limits.get(resource) == size
            and each.name not in running
            and (early or each.stage is not Stage.INIT)
        ]

    @property
    def pending(self) -> bool:
        """Whether it still waits to be admitted or started."""
        return self.status.phase == "Pending" and not self.ending

    @cached_property
    def container_names(self) -> dict[str, str]:
        """Names of its containers by ID, without the runtime's scheme."""
        status = self.status
        return {
            each.container_id.rpartition("://")[2]: each.name
            for each in (*status.container_statuses, *status.init_container_statuses)
            if each.container_id
        }

    @cached_property
    def finished(self) -> bool:
        """Whether it runs no more, and so holds nothing."""
        return self.status.phase in FINISHED

    def may_run_as_root(self, container: str) -> str | None:
        """Why a container may run as root, in words; None: its security context rules it out."""
        pod = self.spec.security_context
        both = (*self.spec.containers, *self.spec.init_containers)
        own = next((each.security_context for each in both if each.name == container), None)
        user = next((s.run_as_user for s in (own, pod) if s and s.run_as_user is not None), None)
        if user is not None:
            return None if user else "runAsUser is 0"
        refused = next((s.run_as_non_root for s in (own, pod) if s and s.run_as_non_root is not None), None)
        return None if refused else "its user is the image's choice"

    def claimed_devices(self) -> list[tuple[str, str, str]]:
        """Container, the name of a ResourceClaim that it uses, and of the request in it; empty: all of it."""
        references = (*self.spec.resource_claims, *self.status.resource_claim_statuses)
        claims = {each.name: each.resource_claim_name for each in references if each.resource_claim_name}
        found = [
            (container.name, claims[each.name], each.request)
            for container in (*self.spec.init_containers, *self.spec.containers)
            for each in container.resources.claims
            if each.name in claims
        ]
        extended = self.status.extended_resource_claim_status
        return found + [
            (each.container_name, extended.resource_claim_name, each.request_name)
            for each in (extended.request_mappings if extended else ())
            if extended
        ]

    def lacks(self, resources: AbstractSet[str], held: AbstractSet[tuple[str, str]]) -> bool:
        """Whether it asks for any of `resources` that it does not hold: (container, resource).

        One half of a pair is not enough. Plain init containers hold nothing by the kubelet's records once
        they have ended, so that their requests count only where the pod holds nothing at all.
        """
        if not held:
            return self.asks_for(resources)
        return any(
            (each.name, resource) not in held
            for each in self.spec.containers
            for resource in resources & self.asked_of(each).keys()
        )

    def asks_for(self, resources: AbstractSet[str]) -> bool:
        """Whether any of its containers asks the kubelet for one of `resources`."""
        spec = self.spec
        return any(
            resources & self.asked_of(each).keys() for each in (*spec.containers, *spec.init_containers)
        )

    def asked_of(self, container: ContainerSpec) -> dict[str, int]:
        """Whole units of extended resources for which the kubelet asks device plugins.

        A limit of 0 asks for nothing. Left out is what is no whole number of units, and what comes by DRA.
        """
        limits, claim = container.resources.limits, self.status.extended_resource_claim_status
        given = claim.request_mappings if claim and limits else ()
        by_dra = {each.resource_name for each in given if each.container_name == container.name}
        found: dict[str, int] = {}
        for resource, quantity in limits.items():
            if "/" in resource and resource not in by_dra:  # extended resources alone count whole units
                with suppress(ValueError):
                    found[resource] = units(quantity)
        return {resource: count for resource, count in found.items() if count}


# Demands for a pair of fractional resources, and whether they can be granted: pure.
#
# The rules of vGPU are those that gpu-manager's users know (its `pkg/services/allocator`): 1..99 cores are a
# share of one GPU, 100, 200, ... whole GPUs. What it guessed at or granted silently is refused or said.

CORES = 100  # per GPU, in both pairs


VGPU, MPS = PAIRS[Mode.VGPU], PAIRS[Mode.MPS]

STATIC_PODS = (
    "a static pod cannot have a share, since its spec is not to be seen before it runs; use a DaemonSet"
)
WAITING_FOR_GPU = "WaitingForGPU"  # reason of the event on a pod that says what it waits for


class Impossible(Exception):
    """A request that no state of the node can grant; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Units that one container asks for. `whole` above 0: that many GPUs with all their cores and memory."""

    cores: int
    blocks: int
    whole: int = 0

    def text(self) -> str:
        """In words, for messages."""
        if self.whole:
            return f"{self.whole} whole GPU{'s' if self.whole > 1 else ''}"
        cores = f"{self.cores} cores and " if self.cores else ""
        return f"{cores}{self.blocks} memory blocks"


def demand_of(pair: ResourcePair, container: Container) -> Demand | None:
    """The demand of a container for a pair; None: it has none. Raises Impossible."""
    cores, blocks = container.limits.get(pair.core, 0), container.limits.get(pair.memory, 0)
    if not cores and not blocks:
        return None
    who = f"container {container.name}"
    if cores > CORES and (not pair.whole_gpus or cores % CORES):
        rule = (
            f"more than {CORES} must be a multiple of {CORES}, which stands for whole GPUs"
            if pair.whole_gpus
            else f"a share lies on one GPU, which has {CORES}"
        )
        raise Impossible(f"{who} asks for {cores} of {pair.core}: {rule}")
    if pair.whole_gpus and cores and cores % CORES == 0:
        return Demand(cores, blocks, whole=cores // CORES)
    if not blocks:
        raise Impossible(
            f"{who} asks for {cores} of {pair.core} without {pair.memory}: add {pair.memory} to its limits"
            + (f", or ask for {CORES} cores to get a whole GPU" if pair.whole_gpus else "")
        )
    if not cores and not pair.memory_alone:
        raise Impossible(
            f"{who} asks for {blocks} of {pair.memory} without {pair.core}: add {pair.core} to its limits"
        )
    return Demand(cores, blocks)


@dataclass(frozen=True, slots=True)
class InitContainerGroup:
    """The joint demand of containers that inherit units from init containers, on the same GPUs."""

    peak: Demand
    containers: frozenset[str]  # names of those containers


def init_group_of(pair: ResourcePair, containers: Iterable[Container]) -> InitContainerGroup | None:
    """The part of a pod that init containers tie together; None without init containers that ask.

    The kubelet gives a container first what plain init containers before it had, unasked, and only then asks
    for more (pkg/kubelet/cm/devicemanager, `devicesToAllocate`): an heir must share the GPU, which
    therefore must have room for all of them from the start. Raises Impossible.
    """
    reuse_cores = reuse_blocks = cores = blocks = whole = span = 0
    members: list[str] = []
    for container in containers:
        demand = demand_of(pair, container)
        if demand is None:
            continue
        init = container.stage is Stage.INIT
        inherits = bool((demand.cores and reuse_cores) or (demand.blocks and reuse_blocks))
        if not init and not inherits:
            continue
        if inherits and span > 1 and demand.whole < span:
            raise Impossible(
                f"container {container.name} would inherit units of {span} GPUs from an init container: "
                f"let it ask for {span * CORES} cores or more, or the init container for one GPU at most"
            )
        members.append(container.name)
        cores += max(0, demand.cores - reuse_cores)
        blocks += max(0, demand.blocks - reuse_blocks)
        whole = max(whole, demand.whole)
        if init:
            span = max(span, demand.whole, 1)
            reuse_cores, reuse_blocks = max(reuse_cores, demand.cores), max(reuse_blocks, demand.blocks)
        else:
            reuse_cores, reuse_blocks = (
                max(0, reuse_cores - demand.cores),
                max(0, reuse_blocks - demand.blocks),
            )
    if whole and cores > whole * CORES:
        raise Impossible(
            f"containers {', '.join(members)} share the GPUs of an init container and need {cores} cores "
            f"there, of which {whole * CORES} exist; ask for fewer, or for none in the init containers"
        )
    return InitContainerGroup(Demand(cores, blocks, whole), frozenset(members)) if members else None
