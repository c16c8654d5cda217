"""The node as `gpu-node-agent status` shows it: one JSON document."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from agent import __version__
from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector
from agent.inventory.actor import Inventory
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import GpuState, Snapshot, boot_seconds
from agent.kit.tasks import Cell
from agent.model.health import HealthState, Rules
from agent.model.holding import GpuHolder, Record
from agent.model.modes import Mode
from agent.modes.planner import GpuSwitch, SwitchState
from agent.modes.wing import Document, Wing
from agent.modes.withholding import CordonBook

# Who held what when the kubelet's records could last be read.


class LastHolders:
    def __init__(self, cell: Cell[Record | None]) -> None:
        self._cell = cell
        self._last: Record | None = None
        self._lost: float | None = None  # since when there is nothing newer

    async def run(self) -> None:
        """Follow the record, for ever."""
        async for found in self._cell.values():
            self._take(found)

    def known(self) -> tuple[Record | None, float | None]:
        """The record, and its age in seconds; no age: it is of now, or there never was one."""
        self._take(self._cell.value)
        return self._last, None if self._lost is None or self._last is None else monotonic() - self._lost

    def _take(self, found: Record | None) -> None:
        if found is not None:
            self._last, self._lost = found, None
        elif self._lost is None:
            self._lost = monotonic()


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Where the report comes from."""

    inventory: Inventory
    gpu_monitor: GpuMonitor
    holdings: HoldingsWatch
    switch: Cell[SwitchState]
    injector: Injector
    blockers: Callable[[], Sequence[str]]
    remarks: Callable[[], Sequence[str]]
    cordons: CordonBook
    wings: Mapping[Mode, Wing]
    last: LastHolders


def report(sources: StatusSources) -> Document:
    """The present moment. Keys are public: scripts read them (`status --json`)."""
    snapshot = sources.inventory.snapshot.value
    switch = sources.switch.value
    switches = {gpu.uuid: gpu for gpu in switch.gpus}
    pods, age = sources.last.known()
    holders = pods.by_gpu if pods is not None else {}
    blockers = list(sources.blockers())
    choice = sources.injector.choice
    driver = snapshot.driver
    return {
        "version": __version__,
        "ready": not blockers,
        "blockers": blockers,
        "driver": driver.version if driver else None,
        "cuda": "{}.{}".format(*driver.cuda_version) if driver else None,
        "mode": {"desired": switch.desired, "phase": switch.phase.value, "message": switch.message},
        "injection": {"way": "cdi" if choice.cdi else "envvar", "reason": choice.reason},
        "releasedForSeconds": _released_for(snapshot),
        "holdersKnown": pods is not None,
        # How old the record of holders is, where it cannot be read now; null: it is of now, or there is none.
        "holdersAgeSeconds": None if age is None else round(age, 1),
        "problems": _problems(sources, blockers),
        "gpus": [
            _gpu(sources, state, switches.get(state.uuid), holders.get(state.uuid, []))
            for state in snapshot.gpus
        ],
        "unreadable": [{"index": one.index, "cause": one.cause} for one in snapshot.unreadable],
    }


def _released_for(snapshot: Snapshot) -> float | None:
    if snapshot.released_until is None:
        return None
    return round(max(0.0, snapshot.released_until - boot_seconds()), 1)


def _problems(sources: StatusSources, blockers: Sequence[str]) -> list[str]:
    """Degradations, though the node serves."""
    found = []
    if sources.gpu_monitor.events.problem:
        found.append(
            f"NVML's events cannot be waited for, probing alone watches: {sources.gpu_monitor.events.problem}"
        )
    if sources.gpu_monitor.persistence.problem:
        found.append(f"verdicts would not survive a restart: {sources.gpu_monitor.persistence.problem}")
    if sources.holdings.problem and sources.holdings.problem not in blockers:
        found.append(f"it is not known which pods hold units: {sources.holdings.problem}")
    return [*found, *sources.remarks()]


def _gpu(
    sources: StatusSources, state: GpuState, switch: GpuSwitch | None, holders: Sequence[GpuHolder]
) -> Document:
    gpu = state.gpu
    active = switch.active if switch else None
    cordon = sources.cordons.cell.value.get(state.uuid)
    wing = sources.wings.get(active.mode) if active else None
    document = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.product,
        "memoryBytes": gpu.memory_bytes,
        "numaNode": gpu.numa_node,
        "pciBusId": gpu.pci_bus_id,
        "minor": gpu.minor,
        "mig": gpu.mig_enabled,
        "mode": {
            "active": active.mode.value if active else "off",
            "wanted": switch.wanted.mode.value if switch else "off",
            "door": "dra" if active and active.dra else "plugin",
            "selling": bool(active and (active.offered or active.claimable)),
            "reason": cordon.words if cordon else _mode_reason(switch, sources),
            "waitingFor": list(switch.waiting_for) if switch else [],
            "enforced": wing.enforced() if wing else None,
        },
        "health": _health(state, sources.inventory.rules, state.uuid in sources.gpu_monitor.events.watched),
        "cordon": {"since": cordon.since, "reason": cordon.reason} if cordon else None,
        "lastXid": sources.inventory.counters.last_xid.get(state.uuid),
        "mps": None,
    }
    for each in sources.wings.values():
        document |= each.gpu_facts(state.uuid)
    return document | {"holders": _holders(holders, state.uuid, sources.wings)}


def _mode_reason(switch: GpuSwitch | None, sources: StatusSources) -> str:
    if switch is None:
        return "no mode is in force yet"
    waits = switch.active.mode is Mode.OFF is not switch.wanted.mode
    if waits and sources.holdings.problem and not switch.problem:
        return f"which pods hold it is not known, so that no mode is put in force: {sources.holdings.problem}"
    return switch.problem or switch.active.reason or switch.wanted.reason


def _health(state: GpuState, rules: Rules, events: bool) -> Document:
    health, now = state.health, boot_seconds()
    left = None if health.until is None else round(max(0.0, health.until - now), 1)
    sick = health.state is not HealthState.HEALTHY
    return {
        "state": health.state.value,
        "served": state.healthy,
        "cause": state.blocked or health.cause,
        "obstacle": health.obstacle,
        "remedy": "" if state.blocked else rules.remedy(health),
        "forSeconds": round(max(0.0, now - health.since), 1) if sick else None,
        "probationLeftSeconds": left,
        "events": events,  # false: watched by probing alone
    }


def _holders(holders: Sequence[GpuHolder], uuid: str, wings: Mapping[Mode, Wing]) -> list[Document]:
    """One entry for each container, whatever number of resources it holds."""
    found: dict[tuple[str, str], Document] = {}
    for holder in holders:
        holding = holder.holding
        entry = found.setdefault(
            (holder.pod, holding.container), {"pod": holder.pod, "container": holding.container, "units": {}}
        )
        if holding.share:
            entry["claim"] = holding.share.claim
        entry["units"] |= holding.units_of(uuid)
        entry |= wings[holder.mode].holder_facts(holding, uuid)
    return list(found.values())
