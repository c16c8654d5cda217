"""Events on the node."""

from agent.inventory.actor import Transition
from agent.model.health import FaultKind, HealthState
from agent.node.conditions import node_events

HEALTHY, SUSPECT, UNHEALTHY, PROBATION = HealthState


def told(*changes: tuple[HealthState | None, HealthState, FaultKind | None]) -> list[tuple[str, bool]]:
    events: list[tuple[str, bool]] = []
    listen = node_events(lambda reason, _, warning: events.append((reason, warning)))
    for before, after, fault in changes:
        listen(Transition("GPU-1", 1, before, after, "a cause", fault))
    return events


def test_a_fault_and_its_end() -> None:
    assert told(
        (None, HEALTHY, None),
        (HEALTHY, UNHEALTHY, FaultKind.XID),
        (UNHEALTHY, PROBATION, FaultKind.XID),
        (PROBATION, UNHEALTHY, FaultKind.XID),
        (UNHEALTHY, PROBATION, FaultKind.XID),
        (PROBATION, HEALTHY, FaultKind.XID),
    ) == [("GPUUnhealthy", True), ("GPURecovered", False)]


def test_a_lost_gpu_has_a_reason_of_its_own() -> None:
    assert told((HEALTHY, UNHEALTHY, FaultKind.LOST)) == [("GPULost", True)]


def test_a_suspicion_that_ends_is_not_worth_an_event() -> None:
    assert told((HEALTHY, SUSPECT, FaultKind.HUNG), (SUSPECT, HEALTHY, FaultKind.HUNG)) == []
