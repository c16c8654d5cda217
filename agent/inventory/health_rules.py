"""The health rules in force: NVIDIA's table with what the configuration changes."""

from dataclasses import replace

from agent import settings
from agent.model.health import FaultKind, Rules
from agent.model.nvlink_xids import NUMBERS as NVLINK_XIDS
from agent.model.xids import UNKNOWN, XIDS, Rule, Verdict, XidClass, default_verdict


def rules_from(wanted: settings.HealthSettings) -> Rules:
    """Rules for a configuration. A class set for an Xid brings that class's verdict and quiet time along."""
    quiet = wanted.quiet
    by_class = {
        XidClass.APPLICATION: 0.0,
        XidClass.RESET: quiet.needs_reset,
        XidClass.REBOOT: quiet.needs_reboot,
        XidClass.CONTAINED: quiet.contained,
        XidClass.INFORMATIONAL: 0.0,
    }
    unknown = replace(UNKNOWN, quiet_seconds=quiet.unknown)
    xids = {number: replace(rule, quiet_seconds=by_class[rule.kind]) for number, rule in XIDS.items()}
    for number, override in wanted.xids.items():
        xids[int(number)] = _overridden(xids.get(int(number), unknown), override, by_class)
    others = dict(Rules().others)
    for kind, seconds in (
        (FaultKind.ECC, quiet.ecc),
        (FaultKind.REMAP, quiet.ecc),
        (FaultKind.LOST, quiet.lost),
        (FaultKind.HUNG, quiet.probe),
        (FaultKind.PROBE, quiet.probe),
    ):
        others[kind] = replace(others[kind], quiet_seconds=seconds)
    return Rules(xids, unknown, others, NVLINK_XIDS - {int(number) for number in wanted.xids})


def _overridden(rule: Rule, wanted: settings.XidOverride, quiet: dict[XidClass, float]) -> Rule:
    if wanted.class_ is not None:
        kind = XidClass(wanted.class_)
        rule = replace(rule, kind=kind, verdict=default_verdict(kind), quiet_seconds=quiet[kind])
    if wanted.verdict is not None:
        rule = replace(rule, verdict=Verdict(wanted.verdict))
    if wanted.recovers is not None:
        rule = replace(rule, recovers=wanted.recovers)
    if wanted.quiet_seconds is not None:
        rule = replace(rule, quiet_seconds=wanted.quiet_seconds)
    return rule
