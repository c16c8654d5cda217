"""Messages to the inventory actor, and the state that follows from each: pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agent.inventory.snapshot import GpuState, HealthRecord, KernelXid, Snapshot, Unreadable
from agent.model import health as verdicts
from agent.model.gpu import Driver, Gpu, Topology
from agent.model.health import HEALTHY, Fault, FaultKind, Health, RecoveryAction, Rules

# Messages to the inventory actor. `at` is always seconds since boot (`boot_seconds`).


@dataclass(frozen=True, slots=True)
class Probed:
    """How the probe of one GPU went: `fault` None means that it answered."""

    uuid: str
    fault: Fault | None = None
    detail: str = ""  # the failure in words
    ecc_risen: bool = False  # uncorrectable errors more than at the probe before
    was_reset: bool = False  # volatile counters less than at the probe before
    obstacle: str = ""  # what waits for a reset (row remap, page retirement)
    remap_failed: bool = False
    action: RecoveryAction | None = None  # what the driver asks for; None: not reported


@dataclass(frozen=True, slots=True)
class Scanned:
    """A scan of all enumeration indices succeeded; some of them may have been unreadable."""

    driver: Driver
    gpus: tuple[Gpu, ...]
    unreadable: tuple[Unreadable, ...] = ()
    probes: tuple[Probed, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Unavailable:
    """NVML as a whole cannot be used; `problem` says why and what helps."""

    problem: str
    released_until: float | None = None
    at: float = 0.0
    let_go: str | None = None  # of a release: empty once NVML is closed, else why it cannot be


@dataclass(frozen=True, slots=True)
class Accused:
    """Something happened to a GPU: an Xid, an ECC event."""

    uuid: str
    fault: Fault
    at: float
    instance: tuple[int, int] | None = None  # GPU and compute instance that it concerns alone


@dataclass(frozen=True, slots=True)
class KernelXidSeen:
    """An Xid in the kernel log of a GPU that NVML sends no events for."""

    xid: KernelXid
    at: float


@dataclass(frozen=True, slots=True)
class XidExplained:
    """The log line of an Xid that NVML reports by its number alone."""

    xid: KernelXid
    at: float


@dataclass(frozen=True, slots=True)
class Restored:
    """Remains of earlier runs: verdicts, and Xids that fell while no agent listened."""

    records: tuple[HealthRecord, ...]
    kernel_xids: tuple[KernelXid, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """A person declares a GPU healthy."""

    uuid: str
    at: float


@dataclass(frozen=True, slots=True)
class Removed:
    """A person says that a GPU which the driver no longer lists was taken out of the machine."""

    uuid: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The links between the GPUs were read again."""

    topology: Topology


Message = (
    Scanned | Unavailable | Accused | KernelXidSeen | XidExplained | Restored | Cleared | Removed | Connected
)


# The only place where the inventory changes: a pure function from a snapshot and a message to the next.

__all__ = ["LOST", "Message", "Scanned", "Unavailable", "records", "reduce"]

LOST: Final = "the driver no longer lists this GPU (lost, fallen off the bus or removed)"
STANDARD: Final = Rules()


def reduce(before: Snapshot, message: Message, rules: Rules = STANDARD) -> Snapshot:
    """The inventory after `message`; the same object if nothing changed."""
    match message:
        case Scanned():
            after = _after_scan(before, message, rules)
        case Unavailable():
            after = _unavailable(before, message, rules)
        case Accused():
            after = _accused(before, message, rules)
        case KernelXidSeen(xid, at):
            after = _of_device(before, xid, lambda one: _accused_by_kernel(one, xid, rules, at))
        case XidExplained(xid, at):
            after = _of_device(before, xid, lambda one: verdicts.explained(one, xid.fault, rules, at))
        case Restored(records, kernel_xids):
            remembered = {record.gpu.uuid: record for record in records}
            after = replace(before, remembered=remembered, awaiting=kernel_xids)
        case Cleared(uuid):
            after = _of_gpu(before, uuid, lambda state: replace(state, health=HEALTHY, sick={}))
        case Removed(uuid):
            kept = tuple(state for state in before.gpus if state.uuid != uuid or not state.health.away)
            after = before if kept == before.gpus else replace(before, gpus=kept)
        case Connected(topology):
            after = replace(before, topology=topology)
    if after == before:
        return before
    return replace(
        after, generation=before.generation + 1, by_uuid={state.uuid: state for state in after.gpus}
    )


def _unavailable(before: Snapshot, message: Unavailable, rules: Rules) -> Snapshot:
    known, remembered = before.gpus, before.remembered
    if message.released_until is not None and not known:
        # An agent that starts while NVML is released: the IDs of its GPUs stay listed, for their holders and
        # so that nobody takes the node for one without GPUs.
        listed = [record.gpu for record in remembered.values() if record.listed]
        known = tuple(_first_seen(before, GpuState(gpu), rules, message.at) for gpu in listed)
        remembered = {uuid: record for uuid, record in remembered.items() if not record.listed}
    return replace(
        before,
        problem=message.problem,
        gpus=tuple(replace(state, blocked=message.problem) for state in known),
        remembered=remembered,
        released_until=message.released_until,
        let_go=message.let_go,
    )


def _with_health(before: Snapshot, uuid: str, change: Callable[[Health], Health]) -> Snapshot:
    known = before.by_uuid.get(uuid)
    if known is None:
        return before
    after = change(known.health)
    if after is known.health:
        return before
    return _of_gpu(before, uuid, lambda state: replace(state, health=after))


def _of_gpu(before: Snapshot, uuid: str, change: Callable[[GpuState], GpuState]) -> Snapshot:
    return replace(before, gpus=tuple(change(one) if one.uuid == uuid else one for one in before.gpus))


def _accused(before: Snapshot, message: Accused, rules: Rules) -> Snapshot:
    """Of an instance that is not known, or not any more, the GPU is accused."""
    uuid, fault, at = message.uuid, message.fault, message.at
    known = before.by_uuid.get(uuid)
    parts = (
        {(each.gpu_instance, each.compute_instance): each.uuid for each in known.gpu.instances}
        if known
        else {}
    )
    part = parts.get(message.instance) if message.instance else None
    if known and part:
        judged = verdicts.event(known.sick.get(part, HEALTHY), fault, rules, at)
        sick = {**known.sick, part: judged} if judged is not HEALTHY else known.sick
        return _of_gpu(before, uuid, lambda state: replace(state, sick=sick))
    return _with_health(before, uuid, lambda one: verdicts.event(one, fault, rules, at))


def _of_device(before: Snapshot, xid: KernelXid, change: Callable[[Health], Health]) -> Snapshot:
    """`change` for the GPU at the address of a log line."""
    found = next((state.uuid for state in before.gpus if _same_device(state, xid)), None)
    return before if found is None else _with_health(before, found, change)


def _after_scan(before: Snapshot, scan: Scanned, rules: Rules) -> Snapshot:
    probes = {probe.uuid: probe for probe in scan.probes}
    present: list[GpuState] = []
    for gpu in scan.gpus:
        old = before.by_uuid.get(gpu.uuid)
        if old is None:
            old = _first_seen(before, GpuState(gpu), rules, scan.at)
        health = _judged(old.health, probes.get(gpu.uuid), rules, scan.at)
        present.append(GpuState(gpu, health, sick=_sick(old, gpu, probes.get(gpu.uuid), rules, scan.at)))
    seen = {state.uuid for state in present}
    # GPUs of the verdict file that do not answer now: their IDs stay listed for their holders.
    unseen = [
        GpuState(record.gpu, record.health)
        for uuid, record in before.remembered.items()
        if record.listed and uuid not in seen and uuid not in before.by_uuid
    ]
    missing = [
        replace(
            state,
            health=_judged(state.health, probes.get(state.uuid, _lost(state)), rules, scan.at),
            blocked="",
        )
        for state in (*before.gpus, *unseen)
        if state.uuid not in seen
    ]
    sick = {state.gpu.index for state in missing}
    return replace(
        before,
        driver=scan.driver,
        problem=None,
        released_until=None,
        let_go=None,
        # Lost GPUs keep their place behind the present ones.
        gpus=(*sorted(present, key=lambda state: state.gpu.index), *missing),
        # An index whose GPU is known and judged already is not reported twice.
        unreadable=tuple(one for one in scan.unreadable if one.index not in sick),
        remembered={},
        awaiting=(),
    )


def _first_seen(before: Snapshot, state: GpuState, rules: Rules, at: float) -> GpuState:
    record = before.remembered.get(state.uuid)
    health = record.health if record else HEALTHY
    for xid in before.awaiting:
        if _same_device(state, xid):
            health = _accused_by_kernel(health, xid, rules, at)
    return replace(state, health=health)


def _judged(health: Health, probe: Probed | None, rules: Rules, at: float) -> Health:
    if probe is None:
        return health
    if probe.fault is not None:
        return verdicts.probe_failed(health, probe.fault, probe.detail, rules, at)
    if probe.ecc_risen:
        return verdicts.event(health, Fault(FaultKind.ECC), rules, at)
    return verdicts.probe_passed(
        health, rules, at, probe.obstacle, probe.was_reset, probe.action, probe.remap_failed
    )


def _sick(old: GpuState, gpu: Gpu, probe: Probed | None, rules: Rules, at: float) -> Mapping[str, Health]:
    """Instances that are not well, of those that are there: they recover as their GPU would."""
    if not old.sick or probe is None or probe.fault is not None:
        return old.sick
    there = {each.uuid for each in gpu.instances}
    judged = {
        uuid: verdicts.probe_passed(health, rules, at, probe.obstacle, probe.was_reset)
        for uuid, health in old.sick.items()
        if uuid in there
    }
    return {uuid: health for uuid, health in judged.items() if health is not HEALTHY}


def _lost(state: GpuState) -> Probed:
    return Probed(state.uuid, Fault(FaultKind.LOST), LOST)


def _accused_by_kernel(health: Health, xid: KernelXid, rules: Rules, at: float) -> Health:
    after = verdicts.event(health, xid.fault, rules, at)
    if after is health or xid.new or after.fault == health.fault:
        return after
    # An old line of a log that nobody read so far: the GPU may have been reset since, so checks and
    # quiet time decide instead of a person.
    return replace(after, reset_seen=True)


def _same_device(state: GpuState, xid: KernelXid) -> bool:
    return state.gpu.pci_bus_id.rpartition(".")[0] == xid.bus


def records(snapshot: Snapshot) -> tuple[HealthRecord, ...]:
    """The content of the verdict file for this snapshot."""
    # While NVML is released an agent that starts could not ask it which GPUs there are.
    all_of_them = snapshot.released_until is not None
    kept = tuple(
        HealthRecord(state.gpu, state.health)
        for state in snapshot.gpus
        if all_of_them or state.health is not HEALTHY
    )
    return (*kept, *snapshot.remembered.values())
