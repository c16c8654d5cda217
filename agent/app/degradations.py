"""Degradations while pods are served, in sentences for /readyz and status (`agent.app.readiness`)."""

from collections.abc import Mapping
from typing import Protocol

from agent.cluster.reach import ClusterAccess
from agent.injection.specification import Devices
from agent.modes.cordon_book import CordonBook
from agent.modes.mode_metrics import Patching
from agent.modes.switch_state import Phase, SwitchState
from agent.node.driver_upgrade import DriverUpgrade, UpgradeStage

PATCHED = {"status": "node.status", "taint": "the node's taint", "report": "the Node object"}


class Writer(Patching, Protocol):
    """Somebody who patches the Node object, and says why it failed."""

    @property
    def problem(self) -> str | None:
        """Why the last patch failed; None: it did not."""


def simulated(profile: str | None) -> list[str]:
    """GPUs that are not there."""
    return [f"the GPUs are simulated (simulator.profile: {profile}): pods get none"] if profile else []


def api_server(cluster: ClusterAccess) -> list[str]:
    """An API server that cannot be read."""
    problem = _unread(cluster)
    if problem is None:
        return []
    text = (
        f"the API server cannot be followed: {problem}; the last mode asked for stays in force, and "
        "the scheduler hears of changes at the kubelet's next tick"
    )
    return [text]


def writers(cluster: ClusterAccess, patching: Mapping[str, Writer]) -> list[str]:
    """An API server that can be read, but not be written to."""
    if _unread(cluster):
        return []
    return [
        f"{PATCHED[name]} cannot be patched: {writer.problem}"
        for name, writer in patching.items()
        if writer.problem
    ]


def _unread(cluster: ClusterAccess) -> str | None:
    reflectors = (cluster.node.reflector, cluster.pods.reflector)
    return next((each.problem for each in reflectors if each.problem), None)


def specification(devices: Devices) -> list[str]:
    """Our own CDI specification of the GPUs."""
    if devices.problem is None:
        return []
    return [f"the CDI specification of the GPUs is not as it should be: {devices.problem}"]


def cordons(book: CordonBook) -> list[str]:
    """Cordons that cannot be read."""
    return [f"{book.problem}; the GPUs cordoned before stay so"] if book.problem else []


def driver_upgrade(upgrade: DriverUpgrade) -> list[str]:
    """A driver that is being exchanged."""
    if upgrade.stage is UpgradeStage.NONE:
        return []
    text = (
        f"the GPU operator exchanges the driver of this node (label {upgrade.label}): GPUs "
        "leave their modes when their pods have ended, and nothing is offered until the label changes"
    )
    return [text]


def mode(state: SwitchState) -> list[str]:
    """A request that cannot be obeyed."""
    if state.phase not in (Phase.BLOCKED, Phase.FAILED):
        return []
    return [f"mode {state.desired} is not in force: {state.message}"]
