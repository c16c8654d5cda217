"""The health of one GPU as a pure state machine: healthy -> suspect -> unhealthy -> probation -> healthy.

Time is an input: seconds since boot, which survive a restart of the agent and mean nothing after a
reboot. Nothing here asks a GPU anything; what was seen comes in, the next state comes out. The same
object comes back when nothing changed, so that callers can compare by identity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Final

import msgspec

from agent.model.xids import NUMBERS as NVLINK_XIDS
from agent.model.xids import QUIET_SECONDS, UNKNOWN, XIDS, Rule, Verdict, XidClass, default_verdict

# The recovery action that the driver itself asks for: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
#
# Numbers and meaning: nvml.h, `nvmlDeviceGpuRecoveryAction_t`, and NVIDIA's GPU Memory Error Management,
# "Error Recovery and Response Flags". Drivers before R565 have no such field.


class RecoveryAction(IntEnum):
    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7
    OTHER = 255  # of a driver that knows more than this table

    @classmethod
    def of(cls, number: int) -> "RecoveryAction":
        try:
            return cls(number)
        except ValueError:
            return cls.OTHER

    @property
    def forbids_work(self) -> bool:
        """Whether no new work may be given to the GPU.

        RECOVER_IMEX_DOMAIN concerns memory shared between machines: the GPU itself goes on working.
        """
        return self not in (RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN)

    @property
    def reboots(self) -> bool:
        """Whether the machine has to be booted."""
        return self in (RecoveryAction.NODE_REBOOT, RecoveryAction.SYSTEM_REBOOT)

    @property
    def words(self) -> str:
        return f"the driver asks for {_WORDS[self]}"


_WORDS = {
    RecoveryAction.NONE: "nothing",
    RecoveryAction.GPU_RESET: "a reset of the GPU",
    RecoveryAction.NODE_REBOOT: "a reboot of the node",
    RecoveryAction.DRAIN_P2P: "an end of all peer-to-peer traffic of the GPU",
    RecoveryAction.DRAIN_AND_RESET: "a reset of the GPU once its work has ended",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "a recovery of the IMEX domain",
    RecoveryAction.BUS_RESET: "a reset of the GPU's PCIe bus",
    RecoveryAction.SYSTEM_REBOOT: "a reboot of the system",
    RecoveryAction.OTHER: "a recovery action that this agent does not know",
}


class HealthState(Enum):
    """How far a GPU can be trusted."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # offered, and watched
    UNHEALTHY = "unhealthy"
    PROBATION = "probation"  # probes pass; not offered until the quiet time is over


class FaultKind(Enum):
    """Where the evidence against a GPU came from."""

    XID = "xid"
    ECC = "ecc"  # uncorrectable memory errors, by event or by counter
    LOST = "lost"  # NVML: lost, or not enumerated any more
    HUNG = "hung"  # NVML does not answer about it
    PROBE = "probe"  # NVML answers with another error
    DRIVER = "driver"  # the driver itself asks for a reset or a reboot
    REMAP = "remap"  # a row remap failed: the memory cannot be mended


class Fault(msgspec.Struct, frozen=True, rename={"xid_class": "told"}):
    """A suspected fault of a GPU; `number` is the Xid, or the recovery action that the driver asks for."""

    # Verdict files keep the key of before, so that an earlier agent reads them after a rollback.

    kind: FaultKind
    number: int = 0
    xid_class: XidClass | None = None  # of an Xid of NVLink 5: by the rest of its log line


@dataclass(frozen=True, slots=True)
class Health:
    """The verdict on one GPU. Times are seconds since boot."""

    state: HealthState = HealthState.HEALTHY
    fault: Fault | None = None
    cause: str = ""  # the fault in words, empty when healthy
    since: float = 0.0  # when the state was entered
    last_event: float = 0.0  # the newest evidence against the GPU
    until: float | None = None  # when probation ends if nothing more happens
    obstacle: str = ""  # what keeps an unhealthy or suspect GPU from recovering, by the last probe
    reset_seen: bool = False  # the GPU was reset since the fault, as far as one can see from outside
    away: bool = False  # gone from NVML, by the last probe
    misses: int = 0  # failed probes in a row, counted to 2
    driver_asks: bool = False  # for a reset or a reboot, by the last probe

    @property
    def offered(self) -> bool:
        """Whether units of this GPU may be handed out."""
        return self.state in (HealthState.HEALTHY, HealthState.SUSPECT)


HEALTHY: Final = Health()

LOST_QUIET_SECONDS: Final = 60.0
PROBE_QUIET_SECONDS: Final = 30.0
# How long after an event the driver's word that nothing is to be done counts, and how long probation is then:
# on a B200 the driver asked for a reset 0.4 s after the Xid that called for it.
SETTLED_SECONDS: Final = 10.0
# Reports of one and the same memory error come within this time: Xids 48, 63 and 94, ECC event, counter.
SAME_ERROR_SECONDS: Final = 10.0
CONTAINED_XID: Final = 94
# With a row remap recorded NVIDIA's catalog (WORKFLOW_XID_48) has 63 decide, which calls for nothing.
_EXCUSES: Final = frozenset({63, CONTAINED_XID})


def _defaults() -> dict[FaultKind, Rule]:
    bad = Verdict.UNHEALTHY
    ecc = QUIET_SECONDS[XidClass.RESET]
    return {
        FaultKind.ECC: Rule("uncorrectable memory errors", XidClass.RESET, bad, True, ecc, open=True),
        FaultKind.LOST: Rule("the GPU is lost", XidClass.RESET, bad, True, LOST_QUIET_SECONDS),
        FaultKind.HUNG: Rule("NVML does not answer", XidClass.RESET, bad, True, PROBE_QUIET_SECONDS),
        FaultKind.PROBE: Rule("the health probe fails", XidClass.RESET, bad, True, PROBE_QUIET_SECONDS),
        FaultKind.DRIVER: Rule("the driver asks for a reset", XidClass.RESET, bad, True, SETTLED_SECONDS),
        FaultKind.REMAP: Rule("a row remap failed", XidClass.RESET, bad, True, ecc),
    }


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules in force: NVIDIA's table with what the configuration changes."""

    xids: Mapping[int, Rule] = field(default_factory=lambda: XIDS)
    unknown: Rule = UNKNOWN
    others: Mapping[FaultKind, Rule] = field(default_factory=_defaults)
    # Xids whose log line decides; one that the configuration overrides is not among them.
    by_line: frozenset[int] = NVLINK_XIDS

    def of(self, fault: Fault) -> Rule:
        if fault.kind is FaultKind.DRIVER and RecoveryAction.of(fault.number).reboots:
            return replace(self.others[fault.kind], kind=XidClass.REBOOT)
        if fault.kind is not FaultKind.XID:
            return self.others[fault.kind]
        rule = self.xids.get(fault.number, self.unknown)
        kind = fault.xid_class
        if kind is None or fault.number not in self.by_line:
            return rule
        # A reset that the line calls for must be seen; the line has closed what the number left open.
        recovers = kind is not XidClass.RESET
        return replace(rule, kind=kind, verdict=default_verdict(kind), recovers=recovers, open=False)

    def words(self, fault: Fault) -> str:
        """A fault in words, for lists, logs and refusals."""
        if fault.kind is FaultKind.DRIVER:
            return RecoveryAction.of(fault.number).words
        title = self.of(fault).title
        return f"Xid {fault.number}, {title}" if fault.kind is FaultKind.XID else title

    def remedy(self, health: Health) -> str:
        """The remedy for a GPU that is not healthy; empty for a healthy one."""
        if health.fault is None:
            return ""
        rule = self.of(health.fault)
        if health.fault.kind is FaultKind.REMAP and health.state is HealthState.UNHEALTHY:
            return "have the GPU replaced"
        if health.state is HealthState.PROBATION:
            return "wait: it returns by itself if nothing more happens"
        if health.state is HealthState.SUSPECT:
            return "nothing yet; it is watched" if not health.obstacle else "reset it when it is idle"
        if rule.kind is XidClass.REBOOT and not health.reset_seen:
            return "reboot the node; if it comes again, have the hardware checked"
        if health.away:
            return "reset the GPU or reboot the node (kernel log: NVRM)"
        if rule.recovers and not health.obstacle:
            return "wait: it is probed and returns after a quiet time"
        return "reset the GPU (gpu-node-agent release --for 10m, nvidia-smi --gpu-reset), then clear-health"


def event(health: Health, fault: Fault, rules: Rules, now: float) -> Health:
    """A fault was reported: an Xid, an ECC event, a risen ECC counter."""
    if _excused(health, fault, now):
        return replace(health, last_event=now)
    if fault.kind is FaultKind.XID and fault.number in _EXCUSES and _excusable(health, now):
        return _watched(health, Fault(FaultKind.XID, CONTAINED_XID), rules, now)
    match rules.of(fault).verdict:
        case Verdict.COUNT:
            return health
        case Verdict.SUSPECT:
            return _suspected(health, fault, rules, now)
        case Verdict.UNHEALTHY:
            return _condemned(health, fault, rules, now)


def explained(health: Health, fault: Fault, rules: Rules, now: float) -> Health:
    """The log line of an Xid that was reported by its number alone says what kind of trouble it was."""
    if fault.number not in rules.by_line:
        return health
    rule = rules.of(fault)
    if rule.verdict is Verdict.UNHEALTHY:
        return _condemned(health, fault, rules, now)
    by_number = Fault(fault.kind, fault.number)
    only_this = health.fault == by_number and not health.offered and not health.driver_asks
    if not only_this or now - health.last_event > SAME_ERROR_SECONDS:
        return health
    return HEALTHY if rule.verdict is Verdict.COUNT else _watched(health, fault, rules, now)


def probe_failed(health: Health, fault: Fault, detail: str, rules: Rules, now: float) -> Health:
    """A probe did not pass. A lost GPU is unhealthy at once, any other failure the second time in a row."""
    misses = min(health.misses + 1, 2)
    lost = fault.kind is FaultKind.LOST
    if lost or misses == 2 or not health.offered:
        condemned = _condemned(health, fault, rules, now, keep_event_time=health.misses == 2)
        cause = condemned.cause if condemned.fault != fault else (detail or condemned.cause)
        after = replace(
            condemned,
            cause=cause,
            misses=2 if lost else misses,
            away=lost or health.away,
            obstacle=detail or rules.words(fault),
        )
    elif health.state is HealthState.HEALTHY:
        after = Health(HealthState.SUSPECT, fault, detail or rules.words(fault), now, now, misses=misses)
    else:
        after = replace(health, misses=misses)
    return health if after == health else after


def probe_passed(
    health: Health,
    rules: Rules,
    now: float,
    obstacle: str = "",
    was_reset: bool = False,
    action: RecoveryAction | None = None,
    remap_failed: bool = False,
) -> Health:
    """A probe found the GPU answering and its error counters at rest.

    `obstacle` names what still forbids to trust it again (a row remap or a page retirement that waits for
    a reset); `was_reset`: its volatile counters fell since the last probe; `action`: what the driver asks
    for, None: not reported.
    """
    if action is not None and action.forbids_work:
        return _condemned_by_probe(health, Fault(FaultKind.DRIVER, action), action.words, rules, now)
    if remap_failed:
        return _condemned_by_probe(health, Fault(FaultKind.REMAP), obstacle, rules, now)
    if health.state is HealthState.HEALTHY or health.fault is None:
        return health
    rule = rules.of(health.fault)
    # What was gone and is back went through a reset, and so did what the driver asks it for no more; what was
    # mute for a while did not.
    done = health.driver_asks and action is not None
    present = replace(
        health,
        misses=0,
        away=False,
        reset_seen=health.reset_seen or was_reset or health.away or done,
        obstacle=obstacle,
        driver_asks=health.driver_asks and action is None,
    )
    after = _recovering(present, rule, now, fine=rule.open and action is not None)
    return health if after == health else after


def _recovering(health: Health, rule: Rule, now: float, *, fine: bool) -> Health:
    """The next step of a GPU that answers. `fine`: the driver has settled what its rule leaves open."""
    settling = min(rule.quiet_seconds, SETTLED_SECONDS)
    match health.state:
        case HealthState.SUSPECT if health.fault and health.fault.kind in (FaultKind.HUNG, FaultKind.PROBE):
            return HEALTHY
        case HealthState.SUSPECT:
            if not health.obstacle and now - health.last_event >= rule.quiet_seconds:
                return HEALTHY
        case HealthState.UNHEALTHY:
            if fine and now - health.last_event >= settling:
                return replace(health, state=HealthState.PROBATION, since=now, until=now + settling)
            if not health.obstacle and (rule.recovers or health.reset_seen):
                until = now + rule.quiet_seconds
                return replace(health, state=HealthState.PROBATION, since=now, until=until)
        case HealthState.PROBATION:
            if health.obstacle and not fine:
                return replace(health, state=HealthState.UNHEALTHY, since=now, until=None)
            if health.until is None or now >= health.until:
                return HEALTHY
    return health


def after_reboot(health: Health, now: float) -> Health:
    """A verdict of an earlier boot: the machine was reset, so checks and quiet time decide."""
    if health.state is HealthState.SUSPECT or health.fault is None:
        return HEALTHY
    return replace(
        health,
        state=HealthState.UNHEALTHY,
        since=now,
        last_event=now,
        until=None,
        obstacle="",
        reset_seen=True,
        away=False,
        driver_asks=False,
    )


def _excusable(health: Health, now: float) -> bool:
    """Whether a GPU is condemned by nothing but a memory error of this moment."""
    if health.fault is None or health.offered or health.driver_asks:
        return False
    return _is_memory_error(health.fault) and now - health.last_event <= SAME_ERROR_SECONDS


def _excused(health: Health, fault: Fault, now: float) -> bool:
    """Whether a memory error is the one that Xid 94 has just called contained: its program alone is hit."""
    contained = health.state is HealthState.SUSPECT and health.fault == Fault(FaultKind.XID, CONTAINED_XID)
    return contained and _is_memory_error(fault) and now - health.last_event <= SAME_ERROR_SECONDS


def _is_memory_error(fault: Fault) -> bool:
    return fault.kind is FaultKind.ECC or (fault.kind is FaultKind.XID and fault.number == 48)


def _watched(health: Health, fault: Fault, rules: Rules, now: float) -> Health:
    """Offered again, and watched: what was reported last weighs less than it looked."""
    after = Health(HealthState.SUSPECT, fault, rules.words(fault), now, now)
    return replace(after, obstacle=health.obstacle, misses=health.misses)


def _condemned_by_probe(health: Health, fault: Fault, obstacle: str, rules: Rules, now: float) -> Health:
    """The obstacle that a probe finds on a GPU that answers, for as long as it stands."""
    stays = health.state is HealthState.UNHEALTHY
    known = health if stays else _condemned(health, fault, rules, now)
    asks = fault.kind is FaultKind.DRIVER
    after = replace(known, obstacle=obstacle, misses=0, away=False, driver_asks=asks)
    return health if after == health else after


def _suspected(health: Health, fault: Fault, rules: Rules, now: float) -> Health:
    match health.state:
        case HealthState.HEALTHY:
            return Health(HealthState.SUSPECT, fault, rules.words(fault), now, now)
        case HealthState.SUSPECT:
            return replace(health, fault=fault, cause=rules.words(fault), last_event=now)
        case HealthState.UNHEALTHY:
            return replace(health, last_event=now)
        case HealthState.PROBATION:
            return replace(health, state=HealthState.UNHEALTHY, since=now, last_event=now, until=None)


def _condemned(
    health: Health, fault: Fault, rules: Rules, now: float, keep_event_time: bool = False
) -> Health:
    # A fault that a reset has answered weighs no more: an event after it is a new fault.
    stands = not health.reset_seen and health.state in (HealthState.UNHEALTHY, HealthState.PROBATION)
    keep = stands and health.fault is not None and _gravity(rules, health.fault) >= _gravity(rules, fault)
    stays = health.state is HealthState.UNHEALTHY
    return Health(
        HealthState.UNHEALTHY,
        health.fault if keep else fault,
        health.cause if keep else rules.words(fault),
        since=health.since if stays else now,
        last_event=health.last_event if keep_event_time else now,
        obstacle=health.obstacle if stays else "",
        reset_seen=False,
        away=health.away,
        misses=health.misses,
        driver_asks=health.driver_asks,
    )


def _gravity(rules: Rules, fault: Fault) -> tuple[bool, bool, bool, bool]:
    rule = rules.of(fault)
    return (
        not rule.recovers,
        not rule.open,
        rule.kind is XidClass.REBOOT,
        fault.kind in (FaultKind.XID, FaultKind.ECC),
    )
