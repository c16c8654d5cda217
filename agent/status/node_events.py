"""Kubernetes events on the node about its GPUs."""

from collections.abc import Callable

from agent.inventory.actor import Transition
from agent.model.health import FaultKind, HealthState

Emit = Callable[[str, str, bool], None]  # reason, message, whether it is a warning


def node_events(emit: Emit) -> Callable[[Transition], None]:
    """A listener for `HealthCounters.listeners`. Reasons are listed in docs/names.md."""

    def listen(change: Transition) -> None:
        if change.before is None and change.after is HealthState.HEALTHY:
            return
        gpu = f"GPU {change.uuid} (index {change.index})"
        if change.after is HealthState.UNHEALTHY and change.before is not HealthState.PROBATION:
            reason = "GPULost" if change.fault is FaultKind.LOST else "GPUUnhealthy"
            emit(reason, f"{gpu}: {change.cause}; its units are not handed out", True)
        elif change.after is HealthState.HEALTHY and change.before is not HealthState.SUSPECT:
            emit("GPURecovered", f"{gpu} is healthy again after: {change.cause}", False)

    return listen
