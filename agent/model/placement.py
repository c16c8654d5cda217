"""On which GPU a share goes: pure, deterministic policies over what each GPU has left.

The agent and the extender order GPUs by the same function.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from agent.model.demand import Demand
from agent.model.fragmentation import Free, Mix
from agent.model.free_gpu import FreeGpu
from agent.model.pod import Container, Pod, Stage

# Free GPUs by UUID, which of them must be among the chosen, how many are wanted -> the best set.
WholeChooser = Callable[[Sequence[str], Sequence[str], int], Sequence[str]]

# gpu-admission's annotations (tkestack/gpu-admission, pkg/util): the choice of a scheduler.
HINT = "tencent.com/predicate-gpu-idx-"
HINT_TIME = "tencent.com/predicate-time"
HINT_NODE = "tencent.com/predicate-node"
ASSIGNED = "tencent.com/gpu-assigned"
POLICY = "gpu-node-agent.io/placement"


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
        return lambda gpu: (
            _growth(gpu, gpu.after(demand), before, mix),
            gpu.cores,
            gpu.blocks,
            gpu.index,
        )
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
