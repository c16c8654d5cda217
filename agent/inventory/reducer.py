"""The only place where the inventory changes: a pure function from a snapshot and a message to the next."""

from dataclasses import dataclass, replace

from agent.inventory.snapshot import GpuState, Snapshot, Unreadable
from agent.model.gpu import Driver, Gpu


@dataclass(frozen=True, slots=True)
class Scanned:
    """A scan of all enumeration indices succeeded; some of them may have been unreadable."""

    driver: Driver
    gpus: tuple[Gpu, ...]
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class Unavailable:
    """NVML as a whole cannot be used; `problem` says why and what helps."""

    problem: str


Message = Scanned | Unavailable

LOST = "the driver no longer lists this GPU (lost, fallen off the bus or removed)"


def reduce(before: Snapshot, message: Message) -> Snapshot:
    """The inventory after `message`; the same object if nothing changed."""
    match message:
        case Scanned():
            after = _after_scan(before, message)
        case Unavailable(problem):
            gpus = tuple(replace(state, healthy=False, cause=problem) for state in before.gpus)
            after = replace(before, problem=problem, gpus=gpus)
    if after == before:
        return before
    return replace(
        after, generation=before.generation + 1, by_uuid={state.uuid: state for state in after.gpus}
    )


def _after_scan(before: Snapshot, scan: Scanned) -> Snapshot:
    seen = {gpu.uuid: GpuState(gpu) for gpu in scan.gpus}
    lost = [replace(state, healthy=False, cause=LOST) for state in before.gpus if state.uuid not in seen]
    # Lost GPUs keep their place behind the present ones: their IDs stay listed for their holders.
    gpus = (*sorted(seen.values(), key=lambda state: state.gpu.index), *lost)
    return replace(before, driver=scan.driver, problem=None, gpus=gpus, unreadable=scan.unreadable)
