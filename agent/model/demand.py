"""Demands for a pair of fractional resources, and whether they can be granted: pure.

The rules of vGPU are those that gpu-manager's users know (its `pkg/services/allocator`): 1..99 cores are a
share of one GPU, 100, 200, ... whole GPUs. What it guessed at or granted silently is refused or said.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.model.modes import PAIRS, Mode
from agent.model.pod import Container, Stage
from agent.model.units import ResourcePair

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
