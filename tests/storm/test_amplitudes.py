"""Acts of storms last longer than all that the agent waits for: its constants are read from its code."""

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.storm.acts import agents, api, kubelets, tenants
from tests.storm.liveness import CALM_SECONDS

AGENT = Path(__file__).parents[2] / "agent"
# The longest act by which a room's patience is tried, in seconds. Rooms without an act stand below.
LONGEST = {
    "app": max(api.OUTAGE_SECONDS),
    "cluster": max(api.OUTAGE_SECONDS),
    "holdings": max(kubelets.BLIND_SECONDS),
    "kubelet": max(kubelets.BLIND_SECONDS),
    "pairing": max(kubelets.BLIND_SECONDS),
    "lists": max(kubelets.BLIND_SECONDS),
    "modes": max(kubelets.BLIND_SECONDS),
    "node": max(api.OUTAGE_SECONDS),
    "vgpu": max(kubelets.BLIND_SECONDS),
    "whole": max(kubelets.BLIND_SECONDS),
    "inventory": CALM_SECONDS,
    "model": CALM_SECONDS,
    "nvml": CALM_SECONDS,
    "mps": max(api.OUTAGE_SECONDS),
    "telemetry": max(api.OUTAGE_SECONDS),
}
# Constants beyond every act, and why no fault can hide behind them.
BEYOND = {
    "cluster.event_recorder.KEPT_SECONDS": "how long an event is counted on rather than written anew",
    "holdings.holdings.REWRITE_LONGEST_SECONDS": "a longest pause between tries, which begin at 30 s",
    "modes.planner.LONGEST_SECONDS": "a longest pause between tries, which begin at 5 s",
    "modes.switcher.IDLE_SECONDS": "a look of an idle switcher, which changes wake at once",
    "mps.probing.REPORT_SECONDS": "how often a meddled setting is reported",
    "node.capacity.LONGEST_AGAIN_SECONDS": "a longest pause between tries, which begin at 60 s",
    "telemetry.access.HELD_SECONDS": "how long a reader of metrics is let in; no storm reads them",
    "pairing.cluster_pods.DENIED_LONGEST_SECONDS": "a longest pause between tries, which begin at 30 s",
}
# Programs and servers of their own, which no storm runs; claims and instances, which none asks for yet.
# `_proto` is generated.
NOT_IN_STORMS = frozenset(
    (
        "_proto",
        "check",
        "cleanup",
        "cli",
        "dra",
        "extender",
        "injection",
        "kit",
        "kubectl",
        "mig",
        "settings",
        "simulator",
        "status",
        "web",
    )
)


def _constants() -> dict[str, float]:
    """Seconds that modules of the agent name, by room, module and name."""
    found: dict[str, float] = {}
    for file in sorted(AGENT.rglob("*.py")):
        room = file.relative_to(AGENT).parts[0]
        if room in NOT_IN_STORMS or file.parent == AGENT:
            continue
        module = ".".join(file.relative_to(AGENT).with_suffix("").parts)
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for name, value in _assigned(node):
                if name.endswith("SECONDS"):
                    found[f"{module}.{name}"] = value
    return found


def _assigned(node: ast.stmt) -> list[tuple[str, float]]:
    """Names and the numbers that they are given; a mapping counts by its largest value."""
    target: Any = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value: Any = getattr(node, "value", None)
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    names = target.elts if both else [target]
    values = value.elts if both else [value]
    found = []
    for name, given in zip(names, values, strict=True):
        if isinstance(name, ast.Name) and isinstance(given, ast.expr):
            parts = given.values if isinstance(given, ast.Dict) else [given]
            numbers = [_number(each) for each in parts]
            if known := [each for each in numbers if each is not None]:
                found.append((name.id, max(known)))
    return found


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return float(value) if isinstance(value, int | float) else None


def test_acts_last_longer_than_anything_that_the_agent_waits_for() -> None:
    constants = _constants()
    assert constants["holdings.holdings.REFRESH_SECONDS"] > 0  # they are found
    assert {name.partition(".")[0] for name in constants} <= LONGEST.keys()
    short = {
        name: seconds
        for name, seconds in constants.items()
        if name not in BEYOND and seconds >= LONGEST[name.partition(".")[0]]
    }
    assert not short, f"no act of a storm lasts as long as these: {short}"
    assert constants.keys() >= BEYOND.keys()
    beyond = {name for name in BEYOND if constants[name] < LONGEST[name.partition(".")[0]]}
    assert not beyond, f"an act lasts longer than these by now: {beyond}"


@pytest.mark.parametrize(
    "amplitudes",
    [kubelets.BLIND_SECONDS, kubelets.ANSWER_SECONDS, api.OUTAGE_SECONDS, tenants.GRACE, agents.STEPS],
)
def test_acts_are_short_and_long(amplitudes: tuple[float, ...]) -> None:
    lasts = sorted(map(abs, amplitudes))
    assert lasts[-1] >= 3 * lasts[0]
