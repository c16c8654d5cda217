"""The node as `gpu-node-agent status` shows it: one JSON document, built from what the rooms hold."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent import __version__
from agent.inventory.actor import Inventory
from agent.inventory.clock import boot_seconds
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kubelet.holdings import Holder, HoldingsWatch, holders_by_gpu
from agent.model.demand import VGPU
from agent.model.health import HealthState, Rules
from agent.model.modes import GpuMode, Mode
from agent.modes.cordon_book import CordonBook
from agent.modes.switch_state import GpuSwitch, SwitchState

Document = dict[str, Any]


def _no_mps(_: str) -> Document | None:
    return None


class Limits(Protocol):
    """Limits of vGPU containers."""

    @property
    def computes(self) -> bool:
        """Whether containers that start now are held to their share of compute."""

    def fences(self) -> Mapping[str, bool]:
        """Which fences hold for containers that start now."""

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        """The limits of one container; None: it has none, and is not measured."""


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Where the report comes from. `injection` answers the way in use and why."""

    inventory: Inventory
    gpu_monitor: GpuMonitor
    holdings: HoldingsWatch
    switch: Callable[[], SwitchState]
    injection: Callable[[], tuple[str, str]]
    blockers: Callable[[], Sequence[str]]
    mps: Callable[[str], Document | None] = _no_mps  # the daemon of a GPU, by UUID; None: it has none
    remarks: Callable[[], Sequence[str]] = list
    cordons: CordonBook | None = None
    limits: Callable[[], Limits | None] = lambda: None  # of vGPU containers; None: none are enforced


def report(sources: StatusSources) -> Document:
    """The present moment. Keys are public: scripts read them (`status --json`)."""
    snapshot = sources.inventory.snapshot.value
    switch = sources.switch()
    switches = {gpu.uuid: gpu for gpu in switch.gpus}
    pods = sources.holdings.cell.value
    holders = holders_by_gpu(pods) if pods is not None else {}
    blockers = list(sources.blockers())
    way, why = sources.injection()
    driver = snapshot.driver
    return {
        "version": __version__,
        "ready": not blockers,
        "blockers": blockers,
        "driver": driver.version if driver else None,
        "cuda": "{}.{}".format(*driver.cuda_version) if driver else None,
        "mode": {"desired": switch.desired, "phase": switch.phase.value, "message": switch.message},
        "injection": {"way": way, "reason": why},
        "releasedForSeconds": _released_for(snapshot),
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
    sources: StatusSources, state: GpuState, switch: GpuSwitch | None, holders: Sequence[Holder]
) -> Document:
    gpu = state.gpu
    active = switch.active if switch else None
    mps = sources.mps(state.uuid)
    cordon = sources.cordons.cell.value.get(state.uuid) if sources.cordons else None
    return {
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
            "selling": bool(active and active.offered),
            "reason": _mode_reason(switch),
            "waitingFor": list(switch.waiting_for) if switch else [],
            "enforced": _enforced(active, mps, sources.limits()),
        },
        "health": _health(state, sources.inventory.rules, state.uuid in sources.gpu_monitor.events.watched),
        "cordon": {"since": cordon.since, "reason": cordon.reason} if cordon else None,
        "lastXid": sources.inventory.counters.last_xid.get(state.uuid),
        "mps": mps,
        "holders": [_holder(holder, state.uuid, sources.limits()) for holder in holders],
    }


def _enforced(active: GpuMode | None, mps: Document | None, limits: Limits | None) -> str | None:
    """Whether processes are kept to their shares; None where a GPU is not shared by amounts.

    memory: to that alone, compute is not enforced.
    """
    if active and active.mode is Mode.VGPU:
        held = limits.fences() if limits else {}
        if limits and limits.computes and held.get("library"):
            return "yes"
        return "memory" if held.get("driver") or held.get("library") else "no"
    if active and active.mode is Mode.MPS:
        return "no" if mps and mps["capsAdvisory"] else "yes"
    return None


def _mode_reason(switch: GpuSwitch | None) -> str:
    if switch is None:
        return "no mode is in force yet"
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


def _holder(holder: Holder, uuid: str, limits: Limits | None) -> Document:
    holding = holder.holding
    units = Counter(holding.resource for text in holding.ids if text.partition("::")[0] == uuid)
    found: Document = {"pod": holder.pod, "container": holding.container, "units": dict(units)}
    if limits and holding.resource == VGPU.memory:
        found["limits"] = limits.document(holding.namespace, holding.pod, holding.container, uuid)
    return found
