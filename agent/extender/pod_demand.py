"""All that one pod asks of GPUs, as the kubelet will count it: pure.

A slot is what must lie together: the share, or the whole GPUs, of one container, or of those containers that
inherit units from init containers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent.model.modes import OFFERED_MODES, PAIRS, Mode, ResourcePair
from agent.model.placement import ASSIGNED, HINT, indices_in, places
from agent.model.pod import Container, Demand, Impossible, Pod, Stage, demand_of, init_group_of

# A node lists its time slices by the first of these names, or by another.
WHOLE_GPUS = Mode.PGPU.resources
WHOLE_GPU = WHOLE_GPUS[0]
RESOURCES = tuple(name for mode in OFFERED_MODES for name in mode.resources)


@dataclass(frozen=True, slots=True)
class Slot:
    """Units that go to one GPU, or to `demand.whole` whole ones."""

    mode: Mode
    demand: Demand
    containers: int = 1  # that hold them: each is a client of the GPU's MPS server
    places: tuple[int, ...] = ()  # of its containers, as annotations number them

    @property
    def size(self) -> tuple[int, int, int]:
        """For an order from large to small."""
        return (self.demand.whole, self.demand.cores, self.demand.blocks)


@dataclass(frozen=True, slots=True)
class PodDemand:
    """The demand of a pod; `gpus` counts whole GPUs or time slices in mode pgpu, by whichever name."""

    slots: tuple[Slot, ...] = ()
    gpus: int = 0
    totals: tuple[tuple[str, int], ...] = ()  # by resource, as kube-scheduler counts a pod

    @property
    def nothing(self) -> bool:
        return not self.totals

    @property
    def by_summary(self) -> bool:
        """Whether a node's summary may say all that is to be known: one share, or one set of whole GPUs."""
        return len(self.slots) == 1 and not self.gpus

    @property
    def whole_gpus(self) -> tuple[str, ...]:
        """The resources by which it asks for `gpus`."""
        return tuple(name for name, _ in self.totals if name in WHOLE_GPUS)


def pod_demand(pod: Pod) -> PodDemand:
    """Raises Impossible for a request that no node can grant. Pods of one shape share the object."""
    wanted = tuple((each.stage, _ours(each.limits)) for each in pod.containers)
    try:
        return _of_shape(wanted)
    except Impossible:
        return _worked_out(pod.containers)  # once more, for a sentence that names the container


def _ours(limits: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((resource, limits[resource]) for resource in RESOURCES if limits.get(resource))


@lru_cache(maxsize=4096)
def _of_shape(wanted: tuple[tuple[Stage, tuple[tuple[str, int], ...]], ...]) -> PodDemand:
    return _worked_out([Container(str(n), dict(limits), stage) for n, (stage, limits) in enumerate(wanted)])


def _worked_out(containers: Sequence[Container]) -> PodDemand:
    slots = [slot for mode, pair in PAIRS.items() for slot in _slots(mode, pair, containers)]
    slots.sort(key=lambda slot: slot.size, reverse=True)
    totals = tuple((name, count) for name in RESOURCES if (count := _counted(name, containers)))
    return PodDemand(tuple(slots), sum(_allocated(name, containers) for name in WHOLE_GPUS), totals)


def _slots(mode: Mode, pair: ResourcePair, containers: Sequence[Container]) -> list[Slot]:
    numbers = {name: number for number, name in enumerate(places(containers))}
    group = init_group_of(pair, containers)
    tied = group.containers if group else frozenset()
    found: list[Slot] = []
    if group:
        members = tuple(number for name, number in numbers.items() if name in tied)
        found.append(Slot(mode, group.peak, len(tied), members))
    others = (each for each in containers if each.name not in tied)
    return found + [
        Slot(mode, demand, 1, (numbers[each.name],)) for each in others if (demand := demand_of(pair, each))
    ]


def _allocated(resource: str, containers: Sequence[Container]) -> int:
    """Devices that the kubelet takes for a pod: app containers reuse those of plain init containers."""
    reusable = taken = 0
    for container in containers:
        asked = container.limits.get(resource, 0)
        taken += max(0, asked - reusable)
        reusable = max(reusable, asked) if container.stage is Stage.INIT else max(0, reusable - asked)
    return taken


def _counted(resource: str, containers: Sequence[Container]) -> int:
    """A pod's request by kube-scheduler's rule: the most of init containers and of all that run together."""
    most = sidecars = apps = 0
    for container in containers:
        asked = container.limits.get(resource, 0)
        if container.stage is Stage.SIDECAR:
            sidecars += asked
            most = max(most, sidecars)
        elif container.stage is Stage.INIT:
            most = max(most, sidecars + asked)
        else:
            apps += asked
    return max(most, sidecars + apps)


Chosen = tuple[tuple[int, ...], ...]  # indices of GPUs for each slot


def annotations_of(demand: PodDemand, chosen: Chosen) -> dict[str, str]:
    """The choice as gpu-admission's annotations, not yet carried out."""
    found = {
        f"{HINT}{place}": ",".join(map(str, indices))
        for slot, indices in zip(demand.slots, chosen, strict=True)
        for place in slot.places
    }
    return {**found, ASSIGNED: "false"} if found else {}


def chosen_in(demand: PodDemand, annotations: Mapping[str, str]) -> Chosen | None:
    """The choice in a pod's annotations; None where they lack it for a slot.

    The node's agent writes each container's own GPUs, so the containers of a slot are read together.
    """
    found: list[tuple[int, ...]] = []
    for slot in demand.slots:
        indices: dict[int, None] = {}
        for place in slot.places:
            indices |= dict.fromkeys(indices_in(annotations.get(f"{HINT}{place}", "")))
        if len(indices) != max(1, slot.demand.whole):
            return None
        found.append(tuple(indices))
    return tuple(found)
