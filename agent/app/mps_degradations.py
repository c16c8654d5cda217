"""Degradations of MPS: for status, /readyz and an event."""

from collections.abc import Callable

import structlog

from agent.app.agent import Agent
from agent.kit.cell import Cell
from agent.kit.follow import follow
from agent.model.modes import Assignment, Mode
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_status import EventReason
from agent.plugins.inject import Injector

log = structlog.get_logger()


def advisory_caps(agent: Agent, injector: Injector, assignment: Cell[Assignment]) -> str | None:
    """Why caps do not hold, since a pod can undo them; None: they hold, or nothing is offered by them."""
    problem = injector.caps_problem
    if problem is None or not any(each.mode is Mode.MPS for each in assignment.value.gpus.values()):
        return None
    if agent.cluster and injector.software is None and agent.settings.injection.strategy == "auto":
        return None  # not known yet
    software = "containerd 2.0 or CRI-O 1.23 with kubelet 1.29, or newer ones"
    if agent.settings.mps.advisory_caps == "refuse":
        return f"no MPS share is offered, since a pod could undo its caps here: {problem}; use {software}"
    return (
        f"caps of MPS shares are advisory here, a pod's own variables win over them: {problem}; "
        f"use {software}, or set mps.advisoryCaps: refuse"
    )


async def tell_of_advisory_caps(agent: Agent, injector: Injector, assignment: Cell[Assignment]) -> None:
    """An event whenever caps begin to be advisory, for ever."""
    before: str | None = None

    def look() -> None:
        nonlocal before
        now = advisory_caps(agent, injector, assignment)
        if now and now != before:
            log.warning("mps_caps_advisory", problem=now)
            if agent.cluster:
                agent.cluster.events.node(EventReason.ADVISORY.value, now, warning=True)
        before = now

    await follow(look, assignment, injector.looked)


def remarks(
    agent: Agent, manager: DaemonManager, injector: Injector, assignment: Cell[Assignment]
) -> Callable[[], list[str]]:
    """Degradations of MPS, each in a sentence."""

    def found_now() -> list[str]:
        gpus = agent.inventory.snapshot.value.by_uuid
        found = [
            f"GPU {gpus[uuid].gpu.index if uuid in gpus else uuid}: {problem}"
            for uuid, problem in sorted(manager.leftovers.items())
        ]
        if advisory := advisory_caps(agent, injector, assignment):
            found.append(advisory)
        single = any(each.multi_user is False for each in manager.statuses.value.values())
        if single and agent.settings.mps.root_pods == "refuse":
            found.append(
                "MPS of this driver serves one user at a time on a GPU, and mps.rootPods lets none be root: "
                "pods that share a GPU wait for each other unless they have one runAsUser"
            )
        return found

    return found_now
