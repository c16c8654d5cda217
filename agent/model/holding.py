"""Who holds what: one record for the whole agent, as its room `agent.holdings` reads it. Values alone."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from agent.model.claim_device import ClaimedShare
from agent.model.ids import SEPARATOR, BadDeviceId, parse
from agent.model.modes import MODE_OF_UNIT, Mode
from agent.model.units import REPLICA


class Holder(NamedTuple):
    """A container by its names."""

    namespace: str
    pod: str
    container: str

    @property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}, container {self.container}"


class Source(Enum):
    """Where it stands that a container holds something."""

    LISTED = "listed"  # in the kubelet's PodResources
    CHECKPOINT = "checkpoint"  # in its checkpoint alone, as with plain init containers
    FORGOTTEN = "forgotten"  # the same, of before: this kubelet knows nothing of it, and may ask for it again
    CLAIM = "claim"  # in its PodResources, as a device of a ResourceClaim


@dataclass(frozen=True)
class Holding:
    """Devices of one resource that one container holds. A container without any has no entry.

    By a claim: one device, which `share` describes in the place of IDs.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    source: Source = Source.LISTED
    share: ClaimedShare | None = None

    @cached_property
    def holder(self) -> Holder:
        return Holder(self.namespace, self.pod, self.container)

    @property
    def listed(self) -> bool:
        """Whether the kubelet lists it; else a plain init container may hold it, whether it runs or not."""
        return self.source in (Source.LISTED, Source.CLAIM)

    @cached_property
    def id_set(self) -> frozenset[str]:
        return frozenset(self.ids)

    def units_of(self, gpu: str) -> Mapping[str, int]:
        """How much of a GPU it is, by what is counted."""
        share = self.share
        if share is None:
            count = sum(text.partition(SEPARATOR)[0] == gpu for text in self.ids)
            return {self.resource: count} if count else {}
        if share.gpu != gpu:
            return {}
        pair = share.mode.row.pair
        return {pair.core: share.cores, pair.memory: share.memory} if pair else {share.mode.resources[0]: 1}

    @cached_property
    def gpus(self) -> frozenset[str]:
        """The UUIDs with which its IDs begin."""
        if self.share:
            return frozenset({self.share.gpu})
        return frozenset(text.partition(SEPARATOR)[0] for text in self.ids)


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A container that holds units of a GPU, and in which mode it got them."""

    mode: Mode
    replica: bool  # of a time-sliced GPU
    holding: Holding

    @property
    def pod(self) -> str:
        """namespace/name of the pod."""
        return f"{self.holding.namespace}/{self.holding.pod}".removeprefix("/")


@dataclass(frozen=True)
class Record:
    """Who holds what, by one reading. Kubelets before 1.34 list finished pods too."""

    holdings: tuple[Holding, ...] = ()
    # Every container that the kubelet lists, holding or not.
    containers: tuple[tuple[str, str, str], ...] = ()
    # UIDs of pods that are over by the API server; the kubelet knows nothing of it.
    ended: frozenset[str] = frozenset()
    # UIDs of pods that ask for devices and are not over by the API server, as far as it is known, and of
    # those that hold some by the kubelet though their object is gone: a static pod's mirror may be deleted.
    unfinished: frozenset[str] = frozenset()
    # UIDs of pods that hold devices by the kubelet's checkpoint, by namespace and name.
    uids: Mapping[tuple[str, str], str] = field(default_factory=dict)
    away: bool = False  # the API server is asked, and does not say now which pods there are
    parents: Mapping[str, str] = field(default_factory=dict)  # instance -> its GPU, both by UUID
    # Units of pods that are over which the kubelet's checkpoint still names: one that has just started offers
    # them to nobody before it has heard of all pods.
    leftover: frozenset[str] = field(default=frozenset(), compare=False)
    # When the reading began, by the monotonic clock in seconds: what was granted later is not in it.
    began: float = field(default=-math.inf, compare=False)

    @cached_property
    def pods(self) -> frozenset[tuple[str, str]]:
        """Namespaces and names of the pods that the kubelet lists."""
        return frozenset(names[:2] for names in self.containers)

    @cached_property
    def uuids(self) -> frozenset[str]:
        """GPUs and instances of which anything is held."""
        return frozenset[str]().union(*(each.gpus for each in self.holdings))

    @cached_property
    def by_gpu(self) -> Mapping[str, Sequence[GpuHolder]]:
        """Who holds what of each GPU, by UUID. Resources of other plugins are passed over."""
        found: dict[str, dict[GpuHolder, None]] = {}
        for holding in self.holdings:
            if share := holding.share:
                found.setdefault(share.gpu, {})[GpuHolder(share.mode, replica=False, holding=holding)] = None
            # A container may hold hundreds of units: one of each kind and GPU is taken apart.
            kinds = {text.rstrip("0123456789") if SEPARATOR in text else text: text for text in holding.ids}
            for text in kinds.values():
                with suppress(BadDeviceId):
                    device = parse(text)
                    holder = GpuHolder(MODE_OF_UNIT[device.unit], device.unit is REPLICA, holding)
                    found.setdefault(self.parents.get(device.gpu, device.gpu), {})[holder] = None
        return {gpu: list(holders) for gpu, holders in found.items()}
