"""A kubelet's device manager without sockets: what pairing is asked by, step by step.

After kubelet 1.36, `pkg/kubelet/cm/devicemanager/manager.go`: containers in order, resources of a container
in random order, units of plain init containers handed on unasked, short preferences filled up at random.
"""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agent.holdings.record import Entries, Evidence, View, join
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.kubelet.wire import Refused
from agent.lists.shared_pair import SharedPair, Sharing
from agent.model.gpu import Gpu
from agent.model.holding import Holding, PairMember, Record
from agent.model.modes import Assignment, GpuMode, Mode, ResourcePair
from agent.model.placement import PlacementPolicy
from agent.model.pod import VGPU, Container, Pod, Stage
from agent.pairing.pair_rules import Grant, PairRules
from agent.pairing.pairing import Pairing
from agent.pairing.pod_source import PodSource, PodsUnavailable
from agent.pairing.resolver import PairRefused, RequesterResolver, resource_of
from tests.pods import a_pod, changed

Key = tuple[str, str]


def share(
    name: str, cores: int, blocks: int, stage: Stage = Stage.APP, pair: ResourcePair = VGPU
) -> Container:
    """A container that asks for a pair; 0 leaves a member out."""
    limits = {pair.core: cores, pair.memory: blocks}
    return Container(name, {resource: count for resource, count in limits.items() if count}, stage)


def pod(name: str, *containers: Container, **traits: Any) -> Pod:
    """A waiting pod of the namespace `default`."""
    return changed(a_pod("default", name, containers, uid=f"uid-{name}"), **traits)


def machine(gpus: int, blocks: int) -> Snapshot:
    """GPUs with so many blocks of 256 MiB each."""
    states = tuple(
        GpuState(
            Gpu(
                f"GPU-{n:08d}-0000-0000-0000-000000000000",
                n,
                n,
                f"0000:{n:02x}:00.0",
                "Simulated",
                blocks << 28,
                (9, 0),
            )
        )
        for n in range(gpus)
    )
    return Snapshot(1, None, None, states, by_uuid={state.uuid: state for state in states})


def undisturbed(step: int) -> None:
    """Nothing happens between the calls."""


class AgentKilled(Exception):
    """The agent died before it answered."""


@dataclass
class Admission:
    """The kubelet's knowledge of a pod that it admitted."""

    pod: Pod
    held: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)  # container, resource -> IDs


class KubeletModel(PodSource):
    """The device manager, and the agent under it."""

    node = "node1"

    def __init__(
        self,
        gpus: int = 4,
        blocks: int = 40,
        seed: int = 0,
        pair: ResourcePair = VGPU,
        mode: Mode = Mode.VGPU,
    ) -> None:
        self.pair = pair
        self.random = random.Random(seed)
        self.inventory = Cell(machine(gpus, blocks))
        names = [state.uuid for state in self.inventory.value.gpus]
        self.modes = Cell(Assignment({name: GpuMode(mode) for name in names}))
        self.mode = mode
        self.taken_up: dict[Key, Admission] = {}
        self.api: dict[Key, Pod] = {}
        self.specs_readable = self.answers = True
        self.cached = True  # whether the watch shows pods before the kubelet asks
        self.records_readable = True
        self.lists, self.gets, self.lists_of_pods = 0, 0, 0
        self.watching, self.reachable = True, True  # the API server's watch, and itself
        self.renewed: dict[Key, Pod] = {}  # what the API server has, and an interrupted watch does not show
        self.over: set[str] = set()  # UIDs that have ended by the API server's answer to a question
        # Pods that a kubelet which has just restarted has heard of; None: it has heard of all.
        self.heard: set[Key] | None = None
        self._last_heard: set[Key] | None = None  # at the last reading: another set is another kubelet's
        self.offers_held = False  # the race of kubernetes PR 137534: it has lost sight of what is in use
        self.cell: Cell[Record | None] = Cell(None)
        self.grants: list[Grant] = []
        self.now = 0.0
        self.policy = PlacementPolicy.BINPACK
        self._record = Evidence()
        self.start_agent()

    # What the agent reads

    async def look(self, deadline: float = 1.0) -> Record:
        """The record, of PodResources and the checkpoint."""
        self.lists += 1
        if not self.records_readable:
            raise PodResourcesUnavailable("no kubelet here")
        self._record = join(
            self._record,
            replace(self._listed(), began=self.now, kubelet_since=self.now),
            self.checkpoint(),
            self._view(),
            same_kubelet=self.heard is None or self.heard is self._last_heard,
            fresh=True,
            read=True,
        )
        self._last_heard = self.heard
        return self._record.joined

    @property
    def published(self) -> float:
        return self._record.listed.began if self._record.joined == self.cell.value else -math.inf

    def checkpoint(self) -> Entries:
        return {
            (each.pod.uid, *place): ids for each in self.taken_up.values() for place, ids in each.held.items()
        }

    async def confirm(self, holdings: Collection[Holding]) -> Record:
        """The record after the API server was asked for holders."""
        del holdings
        before, self.over = self._record, {pod.uid for pod in self.renewed.values() if pod.finished}
        if not self.over:
            return before.joined
        self._record = join(
            before, before.listed, before.entries, self._view(), same_kubelet=True, fresh=False
        )
        return self._record.joined

    async def confirm_names(self, names: Collection[Key]) -> None:
        """Nobody's name is another's."""

    def _view(self) -> View:
        pods = {each.uid: each for each in self.api.values() if each.uid not in self.over}
        return View(pods if self.specs_readable else {}, self.specs_readable, over=self.over)

    async def refresh(self) -> None:
        """The record is read by its timer."""
        self.cell.publish(await self.look())
        self.shares.refresh()

    def _listed(self) -> Record:
        """PodResources List: plain init containers are left out."""
        holdings: list[Holding] = []
        containers: list[tuple[str, str, str]] = []
        for (namespace, name), admission in self.taken_up.items():
            if self.heard is not None and (namespace, name) not in self.heard:
                continue
            for container in admission.pod.containers:
                if container.stage is Stage.INIT:
                    continue
                containers.append((namespace, name, container.name))
                for member in PairMember:
                    resource = resource_of(self.pair, member)
                    if ids := admission.held.get((container.name, resource)):
                        holdings.append(Holding(namespace, name, container.name, resource, tuple(ids)))
        return Record(tuple(holdings), tuple(containers))

    def pods_on_node(self) -> Collection[Pod]:
        """The watch's copy."""
        return list(self.api.values()) if self.specs_readable and self.cached else ()

    async def get(self, namespace: str, name: str) -> Pod | None:
        """One GET."""
        if not self.specs_readable:
            raise PodsUnavailable("no API server here")
        return self.api.get((namespace, name))

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        """One GET."""
        self.gets += 1
        if not self.reachable:
            raise PodsUnavailable("no API server here")
        return self.renewed.get((namespace, name), self.api.get((namespace, name)))

    async def list_now(self) -> Collection[Pod]:
        """One list."""
        self.lists_of_pods += 1
        if not (self.reachable and self.specs_readable):
            raise PodsUnavailable("no API server here")
        return list({**self.api, **self.renewed}.values())

    def current(self) -> bool:
        """Whether the watch is up."""
        return self.watching

    # The agent

    def start_agent(self) -> None:
        """A new process that remembers nothing."""
        self._record = Evidence()
        resolver = RequesterResolver(self.pair, cast("Any", self), self)
        self.pairing = Pairing(PairRules(self.pair, self.policy), resolver, clock=lambda: self.now)
        sharing = Sharing(self.pair, self.mode)
        self.shares = SharedPair(sharing, self.inventory, self.modes, self.pairing, self.cell)
        self.shares.restock()

    # The kubelet

    def in_use(self, member: PairMember) -> frozenset[str]:
        """IDs of a member that the kubelet counts as taken, those of init containers among them."""
        resource = resource_of(self.pair, member)
        return frozenset().union(
            *(
                ids
                for each in self.taken_up.values()
                for (_, name), ids in each.held.items()
                if name == resource
            )
        )

    def listed(self, member: PairMember) -> frozenset[str]:
        """All healthy IDs."""
        pools = self.pairing.ledger.pools.values()
        return frozenset().union(*(pool.id_set(member) for pool in pools if pool.offerable))

    def free_cores(self) -> list[str]:
        """IDs of cores that the kubelet offers in a call."""
        return sorted(self.listed(PairMember.CORE) - self.in_use(PairMember.CORE))

    async def admit(self, new: Pod, interrupt: Callable[[int], None] = undisturbed) -> None:
        """Take a pod up and give its containers devices. Raises Refused, AgentKilled; then it holds nothing.

        `interrupt(n)` runs before the n-th call to the agent, and may raise.
        """
        self.api[new.key] = new
        admission = self.taken_up[new.key] = Admission(new)
        if self.heard is not None:
            self.heard.add(new.key)
        try:
            await self._containers(admission, interrupt)
        except (PairRefused, Refused, AgentKilled):
            del self.taken_up[new.key]
            self.api[new.key] = changed(new, phase="Failed")
            raise
        self.api[new.key] = changed(new, phase="Running")

    async def _containers(self, admission: Admission, interrupt: Callable[[int], None]) -> None:
        reusable: dict[str, frozenset[str]] = {}
        step = 0
        for container in admission.pod.containers:
            for member in self.random.sample(list(PairMember), 2):
                resource = resource_of(self.pair, member)
                needed = container.limits.get(resource, 0)
                if not needed:
                    continue
                handed_on = reusable.get(resource, frozenset())
                chosen = set(self.random.sample(sorted(handed_on), min(needed, len(handed_on))))
                if len(chosen) < needed:
                    interrupt(step)
                    step += 1
                    chosen = await self._ask(member, needed, chosen)
                interrupt(step)
                step += 1
                grant = await self.pairing.allocate(member, self.random.sample(sorted(chosen), len(chosen)))
                self.grants.append(grant)
                admission.held[container.name, resource] = frozenset(chosen)
            for (name, resource), ids in admission.held.items():
                if name == container.name:
                    kept = reusable.get(resource, frozenset())
                    reusable[resource] = kept | ids if container.stage is Stage.INIT else kept - ids

    async def _ask(self, member: PairMember, needed: int, chosen: set[str]) -> set[str]:
        free = self.listed(member) - (frozenset() if self.offers_held else self.in_use(member))
        if len(free) < needed - len(chosen):
            raise Refused("requested number of devices unavailable")
        offered = self.random.sample(sorted(free | chosen), len(free | chosen))
        preferred = set(await self.pairing.prefer(member, needed, offered, tuple(chosen))) & (free | chosen)
        chosen = chosen | set(sorted(preferred)[:needed])
        return chosen | set(self.random.sample(sorted(free - chosen), needed - len(chosen)))

    def end(self, key: Key) -> None:
        """A pod ends and is removed."""
        del self.taken_up[key]
        del self.api[key]

    # What must hold

    def gpus_of(self, key: Key, container: str) -> set[str]:
        """GPUs on which a container has units, of whichever member."""
        held = self.taken_up[key].held
        return {
            each.partition("::")[0] for (name, _), ids in held.items() if name == container for each in ids
        }

    def free_on_best(self, cores: int, blocks: int) -> bool:
        """Whether in truth some GPU has room for a share."""
        for pool in self.pairing.ledger.pools.values():
            if pool.gpu in self.held_whole():
                continue
            room = (
                len(pool.core_set - self.in_use(PairMember.CORE)),
                len(pool.block_set - self.in_use(PairMember.MEMORY)),
            )
            if room[0] >= cores and room[1] >= blocks:
                return True
        return False

    def held_whole(self) -> set[str]:
        """GPUs of which one container holds all cores."""
        large = [ids for each in self.taken_up.values() for ids in each.held.values() if len(ids) >= 100]
        pools = self.pairing.ledger.pools.values()
        return {pool.gpu for pool in pools for ids in large if pool.core_set <= ids}
