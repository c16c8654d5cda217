"""On which GPU a request goes: pure, deterministic policies over what each GPU has left.

The agent and the extender order GPUs by the same function.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

from agent.model.gpu import Topology
from agent.model.pod import CORES, Container, Demand, Pod, Stage

# Free capacity of one GPU, for the agent of its node and for the scheduler extender alike: pure.

UNLIMITED = 1 << 30


class FreeGpu(msgspec.Struct, frozen=True, gc=False):
    """Units of one GPU that are neither held nor reserved. The extender makes 80,000 at once."""

    gpu: str  # UUID
    index: int
    cores: int
    blocks: int
    all_blocks: int
    untouched: bool  # nothing of it is held or reserved
    clients: int = UNLIMITED  # further containers that may hold a share of it

    @property
    def largest_share(self) -> int:
        """The largest share in hundredths that fits, with memory asked for in proportion."""
        return min(self.cores, self.blocks * CORES // self.all_blocks) if self.all_blocks else 0

    def fits(self, demand: Demand, containers: int = 1) -> bool:
        """Whether a share fits that so many containers hold together."""
        return self.cores >= demand.cores and self.blocks >= demand.blocks and self.clients >= containers

    def after(self, demand: Demand, containers: int = 1) -> "FreeGpu":
        """With a share placed on it, or with all of it taken."""
        if demand.whole:
            return FreeGpu(self.gpu, self.index, 0, 0, self.all_blocks, untouched=False, clients=0)
        return FreeGpu(
            self.gpu,
            self.index,
            self.cores - demand.cores,
            self.blocks - demand.blocks,
            self.all_blocks,
            untouched=False,
            clients=self.clients - containers,
        )


# How much free GPU the usual mix of pods cannot use: fragmentation gradient descent.
#
# After Weng and others, "Beware of Fragmentation" (USENIX ATC 2023): a pod goes where the expected share of
# free GPU that a pod drawn from the mix could not use grows least. Pure.

# Share of pods in percent by GPUs asked for, in hundredths: a public production mix (issue 10).
USUAL: Mapping[int, float] = {
    100: 55.4, 81: 15.3, 47: 10.6, 32: 4.6, 65: 3.6, 23: 2.0, 46: 1.8, 59: 1.1, 16: 1.0, 55: 1.0, 22: 0.9,
    37: 0.7, 800: 0.6, 11: 0.3, 48: 0.3, 200: 0.2, 400: 0.2, 5: 0.1, 33: 0.1, 35: 0.1, 27: 0.1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Free:
    """Free hundredths on a node: on all GPUs, on those partly used, and how many are wholly free."""

    partly: int
    untouched: int


class Mix:
    """Weights of what pods ask for, in hundredths of a GPU: below 100 a share, above it whole GPUs."""

    def __init__(self, weights: Mapping[int, float] = USUAL) -> None:
        total = sum(weights.values()) or 1.0
        self._shares = [(size, weight / total) for size, weight in weights.items() if size < CORES]
        self._whole = [(size // CORES, weight / total) for size, weight in weights.items() if size >= CORES]
        # One number is asked for again and again: what shares lose on a GPU with so much left.
        self.share_loss = lru_cache(maxsize=1 << 15)(self._share_loss)

    def _share_loss(self, cores: int, fits: int) -> float:
        """Hundredths that shares cannot use of a GPU with `cores` left, where shares up to `fits` fit."""
        return cores * sum(weight for size, weight in self._shares if size > fits)

    def whole_loss(self, free: Free) -> float:
        """Hundredths of a node that pods of whole GPUs cannot use."""
        everything = free.partly + CORES * free.untouched
        return sum(
            weight * (everything if free.untouched < count else free.partly) for count, weight in self._whole
        )


# Which whole GPUs a container should get: the best connected set.
#
# Among sets with the same link score the one that leaves the rest of the free GPUs best connected, among
# those the one of lowest positions. An exact search: GPUs that can be swapped for each other are tried once,
# and a branch is left when even its best case is not better. The kubelet waits for the answer with every pod
# of the node, so the search ends after a number of steps, which machines that exist do not come near, with
# the best set found by then.

# A sum of scores of 16 GPUs stays below this, so own score and rest go into one number.
_BIG: Final = 1 << 20
_MOST_STEPS: Final = 160


def choose(
    topology: Topology, available: Iterable[str], must_include: Sequence[str], size: int
) -> tuple[str, ...]:
    """`size` of the GPUs in `available`, `must_include` first and all of them.

    GPUs that the topology does not know (never seen, links not readable) are taken last. Fewer come back
    only if there are fewer.
    """
    must = tuple(dict.fromkeys(must_include))
    if len(must) >= size:
        return must[:size]
    free = [uuid for uuid in dict.fromkeys(available) if uuid not in must]
    known = sorted(topology.position[uuid] for uuid in free if uuid in topology.position)
    unknown = [uuid for uuid in free if uuid not in topology.position]
    wanted = size - len(must)
    fixed = [topology.position[uuid] for uuid in must if uuid in topology.position]
    picked = known if len(known) <= wanted else _Search(topology, known, fixed, wanted).best()
    chosen = [topology.gpus[number] for number in picked]
    return (*must, *chosen, *unknown[: wanted - len(chosen)])


class _Search:
    """Depth first with bounds over the free GPUs in order of position."""

    def __init__(self, topology: Topology, pool: list[int], fixed: list[int], size: int) -> None:
        scores = topology.scores
        self._size = size
        self._pool = pool
        everyone = [*pool, *fixed]
        # Worth of a GPU by itself: its links to the fixed ones, less what it takes from the rest.
        self._gains = [
            _BIG * sum(scores[one][other] for other in fixed) - sum(scores[one][other] for other in everyone)
            for one in pool
        ]
        self._weights = [[_BIG * scores[one][other] for other in pool] for one in pool]
        self._twins = [topology.twins[one] for one in pool]
        # Half of the best links that a GPU can have within a set of m, for every m.
        self._hopes = [self._hope(row) for row in self._weights]
        self._steps = 0
        self._best_value = -1 << 62
        self._best: tuple[int, ...] = ()

    def best(self) -> list[int]:
        """Positions of the chosen GPUs, in order."""
        for start in self._firsts():
            self._greedy(start)
        self._walk(0, (), 0, self._gains)
        return [self._pool[number] for number in sorted(self._best)]

    def _hope(self, row: list[int]) -> list[int]:
        sums = [0, 0]
        for weight in sorted(row, reverse=True)[: self._size]:
            sums.append(sums[-1] + weight // 2)
        return sums

    def _firsts(self) -> list[int]:
        return [i for i, twin in enumerate(self._twins) if twin not in self._twins[:i]]

    def _keep(self, value: int, chosen: tuple[int, ...]) -> None:
        if value > self._best_value:
            self._best_value, self._best = value, chosen

    def _greedy(self, start: int) -> None:
        gains, chosen, value = list(self._gains), [start], self._gains[start]
        left = set(range(len(self._pool))) - {start}
        while len(chosen) < self._size:
            row = self._weights[chosen[-1]]
            for number in left:
                gains[number] += row[number]
            following = max(left, key=lambda number: (gains[number], -number))
            value += gains[following]
            chosen.append(following)
            left.discard(following)
        self._keep(value, tuple(chosen))

    def _walk(self, first: int, chosen: tuple[int, ...], value: int, gains: list[int]) -> None:
        need = self._size - len(chosen)
        if need == 0:
            self._keep(value, chosen)
            return
        skipped: set[int] = set()
        for number in range(first, len(self._pool) - need + 1):
            if self._steps >= _MOST_STEPS or self._ceiling(number, need, value, gains) <= self._best_value:
                return
            if self._twins[number] in skipped:
                continue
            skipped.add(self._twins[number])
            self._steps += 1
            row = self._weights[number]
            grown = [gain + weight for gain, weight in zip(gains, row, strict=True)]
            self._walk(number + 1, (*chosen, number), value + gains[number], grown)

    def _ceiling(self, first: int, need: int, value: int, gains: list[int]) -> int:
        """No set that takes the rest from `first` on is worth more than this."""
        hopes = self._hopes
        best = sorted((gains[i] + hopes[i][need] for i in range(first, len(gains))), reverse=True)
        return value + sum(best[:need])


# On which GPU a share goes: pure, deterministic policies over what each GPU has left.

# Free GPUs by UUID, which of them must be among the chosen, how many are wanted -> the best set.
WholeChooser = Callable[[Sequence[str], Sequence[str], int], Sequence[str]]

# gpu-admission's annotations (tkestack/gpu-admission, pkg/util): the choice of a scheduler.
HINT = "tencent.com/predicate-gpu-idx-"
HINT_TIME = "tencent.com/predicate-time"
HINT_NODE = "tencent.com/predicate-node"
ASSIGNED = "tencent.com/gpu-assigned"
POLICY = "gpu-node-agent.io/placement"
# Those of this agent for compute and for the live resize of vGPU containers.
BURST, PRIORITY = "gpu-node-agent.io/burst", "gpu-node-agent.io/priority"
RESIZE = "gpu-node-agent.io/resize"


class PlacementPolicy(StrEnum):
    """How a share chooses among the GPUs that have room for it."""

    BINPACK = "binpack"  # the fullest one
    SPREAD = "spread"  # the emptiest one
    FRAGMENTATION = "fragmentation"  # the one whose remainder stays most useful


class NoRoom(Exception):
    """No GPU has room; the text says what the largest free share is."""


@dataclass(frozen=True, slots=True)
class Hint:
    """GPUs that a scheduler chose for a container, by index."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """GPUs in order of index, and why a hint was not followed (empty: it was, or there was none)."""

    gpus: tuple[str, ...]
    hint_ignored: str = ""


def places(containers: Sequence[Container]) -> list[str]:
    """Containers by the number that annotations have for them.

    App containers alone come first, as gpu-admission counts them; then init containers, sidecars among them.
    """
    apps = [each.name for each in containers if each.stage is Stage.APP]
    return apps + [each.name for each in containers if each.stage is not Stage.APP]


def hint_of(pod: Pod, container: str, node: str = "", tied: Collection[str] = ()) -> Hint | None:
    """The scheduler's choice for a container; None without one, with a used one, or one for another node.

    `tied`: containers that must share its GPUs; one that has no choice of its own, as an init container of
    which gpu-admission knows nothing, goes where the first of them is to go that has one.
    """
    if pod.annotations.get(ASSIGNED) == "true":
        return None
    if node and pod.annotations.get(HINT_NODE, node) != node:
        return None
    names = places(pod.containers)
    app = any(each.name == container and each.stage is Stage.APP for each in pod.containers)
    heirs = [container] if app else [container, *(each for each in names if each in tied)]
    texts = (pod.annotations.get(f"{HINT}{names.index(each)}", "") for each in heirs)
    indices = indices_in(next((text for text in texts if text), ""))
    return Hint(indices) if indices else None


def indices_in(text: str) -> tuple[int, ...]:
    """The GPUs that an annotation of a choice names; empty: it is no list of indices."""
    parts = [part.strip() for part in text.split(",")]
    # Some thousand digits are legal in an annotation, and no GPU's index: int() itself would refuse them.
    known = all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts)
    return tuple(map(int, parts)) if known else ()


def policy_of(pod: Pod | None, default: PlacementPolicy) -> PlacementPolicy:
    """The pod's own policy, or the node's where it names none that exists."""
    wanted = pod.annotations.get(POLICY, "") if pod else ""
    return PlacementPolicy(wanted) if wanted in tuple(PlacementPolicy) else default


def place(
    rooms: Mapping[str, FreeGpu],
    demand: Demand,
    policy: PlacementPolicy = PlacementPolicy.BINPACK,
    hint: Hint | None = None,
    whole: WholeChooser | None = None,
    tied: Collection[str] = (),
) -> Choice:
    """GPUs for a demand. `tied`: GPUs that must be among them, since the container has units there.

    Raises NoRoom.
    """
    chooser = whole or lowest
    if demand.whole:
        return _whole(rooms, demand, hint, chooser, tied)
    fitting = [room for room in rooms.values() if room.fits(demand) and (not tied or room.gpu in tied)]
    if not fitting or len(tied) > 1:
        raise NoRoom(_no_room(rooms, demand, tied))
    ignored = ""
    if hint and not tied:
        hinted = [room for room in fitting if hint.indices == (room.index,)]
        if hinted:
            return Choice((hinted[0].gpu,))
        ignored = f"the scheduler chose GPU {_listed(hint.indices)}, which has no room for {demand.text()}"
    return Choice((min(fitting, key=order(policy, demand, list(rooms.values()), usual_mix())).gpu,), ignored)


def lowest(free: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
    """A chooser that knows nothing of links: the first ones."""
    return [*must_include, *(each for each in free if each not in must_include)][:size]


def _whole(
    rooms: Mapping[str, FreeGpu],
    demand: Demand,
    hint: Hint | None,
    chooser: WholeChooser,
    tied: Collection[str],
) -> Choice:
    free = sorted((room for room in rooms.values() if room.untouched), key=lambda room: room.index)
    uuids = [room.gpu for room in free]
    if len(free) < demand.whole or any(uuid not in uuids for uuid in tied) or len(tied) > demand.whole:
        text = f"no {demand.text()} free: {len(free)} of {len(rooms)} GPUs are wholly free"
        raise NoRoom(f"{text}; wait until pods end, or ask for fewer")
    ignored = ""
    if hint and not tied:
        hinted = tuple(room.gpu for room in free if room.index in hint.indices)
        if len(hinted) == len(set(hint.indices)) == demand.whole:
            return Choice(hinted)
        ignored = f"the scheduler chose GPUs {_listed(hint.indices)}, which are not all wholly free"
    chosen = set(chooser(uuids, sorted(tied), demand.whole))
    return Choice(tuple(uuid for uuid in uuids if uuid in chosen), ignored)


def order(
    policy: PlacementPolicy, demand: Demand, gpus: Sequence[FreeGpu], mix: Mix
) -> Callable[[FreeGpu], tuple[float, ...]]:
    """How a policy orders GPUs for a share, the best first. `gpus`: all of the node that are in its mode."""
    if policy is PlacementPolicy.SPREAD:
        return lambda gpu: (-gpu.cores, -gpu.blocks, gpu.index)
    if policy is PlacementPolicy.FRAGMENTATION:
        before = free_of(gpus)
        return lambda gpu: (_growth(gpu, gpu.after(demand), before, mix), gpu.cores, gpu.blocks, gpu.index)
    return lambda gpu: (gpu.cores, gpu.blocks, gpu.index)


def free_of(gpus: Sequence[FreeGpu]) -> Free:
    """Free hundredths of the GPUs of a node."""
    return Free(sum(gpu.cores for gpu in gpus if not gpu.untouched), sum(gpu.untouched for gpu in gpus))


def unusable(gpus: Sequence[FreeGpu], mix: Mix) -> float:
    """Free hundredths of a node's GPUs that pods of the mix cannot use."""
    return sum(mix.share_loss(gpu.cores, gpu.largest_share) for gpu in gpus) + mix.whole_loss(free_of(gpus))


def _growth(before: FreeGpu, after: FreeGpu, free: Free, mix: Mix) -> float:
    """How much more of the node the mix cannot use once one GPU has changed."""
    left = (
        Free(free.partly + after.cores, free.untouched - 1)
        if before.untouched
        else Free(free.partly - before.cores + after.cores, free.untouched)
    )
    shares = mix.share_loss(after.cores, after.largest_share) - mix.share_loss(
        before.cores, before.largest_share
    )
    return round(shares + mix.whole_loss(left) - mix.whole_loss(free), 6)


@lru_cache(maxsize=1)
def usual_mix() -> Mix:
    return Mix()


def _no_room(rooms: Mapping[str, FreeGpu], demand: Demand, tied: Collection[str]) -> str:
    candidates = [room for room in rooms.values() if not tied or room.gpu in tied]
    if len(tied) > 1:
        return (
            f"the container has units of {len(tied)} GPUs, and {demand.text()} must lie on one; "
            "let its init containers ask for one GPU at most"
        )
    if not candidates:
        where = f"GPU {next(iter(tied))}, where the pod has units already, is not offered now" if tied else ""
        why = where or "no GPU of this node is offered in this mode now"
        return f"no room for {demand.text()}: {why}; create the pod again"

    def share(room: FreeGpu) -> tuple[float, int, int]:
        parts = [
            have / want for have, want in ((room.cores, demand.cores), (room.blocks, demand.blocks)) if want
        ]
        return (min(parts), room.cores + room.blocks, -room.index)

    best = max(candidates, key=share)
    scope = "the GPU where the pod has units already" if tied else "any single GPU"
    return (
        f"{demand.text()} do not fit on {scope}: the largest free share is {best.cores} cores and "
        f"{best.blocks} memory blocks, on GPU {best.gpu} (index {best.index}); "
        "ask for less, or create the pod again when others have ended"
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
