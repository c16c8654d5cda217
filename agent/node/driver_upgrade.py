"""Lets go of the driver during an operator's upgrade, and of what a killed agent left on the node.

The kernel module cannot be unloaded while anybody has it open: the agent by NVML, the daemons of mode MPS,
pods. The operator evicts the pods that it knows: neither this agent nor pods with shares are among them.

The operator's intent stands in labels of the node (NVIDIA/k8s-operator-libs, pkg/upgrade; k8s-driver-manager;
mig-parted): its upgrade controller goes through the states of `nvidia.com/gpu-driver-upgrade-state`; who is
about to unload the module, or to change MIG, writes `paused-for-...` into `nvidia.com/gpu.deploy.<operand>`,
also where no upgrade controller runs.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import anyio
import structlog

from agent.cluster.api import now
from agent.cluster.node import Amounts, OwnNode
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import Snapshot, boot_seconds
from agent.kit.tasks import Cell, repeat
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.modes import Mode
from agent.modes.planner import STARTING, SwitchState
from agent.modes.withholding import Cordon, Cordons
from agent.node.capacity import Capacity, Offer, SchedulingTaint

# Remains of a killed agent on the node: figures that the kubelet knows nothing of, and its taint.
#
# Its figures stand until the kubelet's next tick. Whatever is bound by them dies at admission, for this agent
# may offer something else, or may not be registered yet. So they are patched to 0 first, and only then its
# taint goes. A write of that agent that is carried out later still is undone as well: the taint that nobody
# holds by `SchedulingTaint`, figures that are not those of the lists by `Capacity`.

log = structlog.get_logger()

INHERITED_SECONDS = 10.0  # the kubelet's tick has come by then
LOOK_SECONDS = 0.5


class Inherited:
    """Takes them away, once."""

    def __init__(
        self,
        node: OwnNode,
        offer: Offer,
        capacity: Capacity,
        taint: SchedulingTaint,
        resources: frozenset[str],
    ) -> None:
        """`resources`: all that an agent before this one may have offered."""
        self._node = node
        self._offer = offer
        self._capacity = capacity
        self._taint = taint
        self._resources = resources
        self._until = anyio.current_time() + INHERITED_SECONDS

    async def run(self) -> None:
        """Return when nothing is left of it, or the kubelet's tick has come."""
        with self._taint.left_alone(), anyio.CancelScope(deadline=self._until):
            while not (await self._figures_are_right() and self._offer.now() and not self._capacity.less()):
                with anyio.move_on_after(LOOK_SECONDS):
                    await self._node.changes.wait_change(self._node.changes.version)

    async def _figures_are_right(self) -> bool:
        """Take back offered resources of which the kubelet has no device; whether none is left."""
        # This agent's own lists are `Capacity`'s.
        known = self._node.amounts(self._resources - self._offer.now().keys())
        if known is None:
            return False
        # Of a capacity that no device explains the kubelet makes an allocatable again, with every tick.
        offered = {name: (0, 0) for name, (_, left) in known.items() if left > 0}
        if not offered:
            return True
        try:
            taken_in = await self._offer.taken_in()
        except PodResourcesUnavailable:
            return False
        if taken_in is None:
            return True
        # Resources that it knows are another agent's, or it has not heard of that agent's end yet.
        gone: Amounts = {name: amounts for name, amounts in offered.items() if not taken_in.get(name)}
        if gone and await self._capacity.patch(gone):
            log.info("stale_figures_taken_back", resources=sorted(gone))
        return False


# Lets go of the driver while NVIDIA's GPU operator exchanges it on this node, and takes it up again.

STATE_LABEL: Final = "nvidia.com/gpu-driver-upgrade-state"
OPERAND_PREFIX: Final = "nvidia.com/gpu.deploy."
PAUSED_PREFIX: Final = "paused-for-"
# Pods with GPUs are evicted; the module is not touched yet.
DRAINING: Final = frozenset({"pod-deletion-required", "drain-required", "node-maintenance-required"})
# The driver's pod is restarted, whose first container unloads the module.
EXCHANGING: Final = frozenset({"pod-restart-required", "post-maintenance-required"})

# A release lasts so long beyond the last look at the labels, also where the agent is killed meanwhile.
RELEASE_SECONDS: Final = 180.0
RENEW_SECONDS: Final = 60.0
# How long GPUs without a holder may take to leave their mode, for MPS daemons to end: then NVML is closed.
PATIENCE_SECONDS: Final = 30.0


class UpgradeStage(Enum):
    """How far an exchange of the driver is."""

    NONE = "none"
    DRAIN = "drain"  # GPUs leave their modes as their pods end
    RELEASE = "release"  # and NVML is closed


def stage_of(labels: Mapping[str, str]) -> tuple[UpgradeStage, str]:
    """The request of a node's labels, and the label that makes it."""
    for key, value in sorted(labels.items()):
        if key.startswith(OPERAND_PREFIX) and value.startswith(PAUSED_PREFIX):
            return UpgradeStage.RELEASE, f"{key}={value}"
    state = labels.get(STATE_LABEL, "")
    if state in EXCHANGING:
        return UpgradeStage.RELEASE, f"{STATE_LABEL}={state}"
    if state in DRAINING:
        return UpgradeStage.DRAIN, f"{STATE_LABEL}={state}"
    return UpgradeStage.NONE, ""


class DriverUpgrade:
    """Follows the node's labels; cordons all GPUs, and closes NVML once no daemon of an idle GPU is left."""

    def __init__(
        self,
        node: OwnNode,
        monitor: GpuMonitor,
        inventory: Cell[Snapshot],
        switch: Cell[SwitchState],
        by_hand: Cell[Cordons],
        cordons: Cell[Cordons],
    ) -> None:
        """`cordons` are those that the mode switcher follows: those `by_hand`, and of all GPUs meanwhile."""
        self._node = node
        self._monitor = monitor
        self._inventory = inventory
        self._switch = switch
        self._by_hand = by_hand
        self._cordons = cordons
        self.stage = UpgradeStage.NONE
        self.label = ""  # that asks for it
        self._cordon: Cordon | None = None  # of all GPUs, until NVML answers again
        self._release_by = 0.0  # when NVML is closed at the latest
        self._until: float | None = None  # our release lasts so long, in seconds since boot
        self._released = False  # the inventory has shown it
        self._refused = False  # a person ended it: not again before the labels ask for nothing

    async def run(self) -> None:
        """Follow the labels for ever."""

        async def look() -> float:
            return self.look()

        await repeat(look, self._node.changes, self._inventory, self._switch, self._by_hand)

    def remarks(self) -> list[str]:
        """A driver that is being exchanged."""
        if self.stage is UpgradeStage.NONE:
            return []
        text = (
            f"the GPU operator exchanges the driver of this node (label {self.label}): GPUs "
            "leave their modes when their pods have ended, and nothing is offered until the label changes"
        )
        return [text]

    def look(self) -> float:
        """Follow the labels of this moment; after how many seconds to look again, whatever happens."""
        labels = self._node.labels()
        if labels is None:  # not known yet
            self._put_cordons()
            return RENEW_SECONDS
        self._heard(*stage_of(labels))
        if self.stage is UpgradeStage.NONE:
            self._back_in_service()
            return RENEW_SECONDS
        self._put_cordons()
        if self.stage is UpgradeStage.DRAIN:
            self._end_release()  # as where the driver's pod has been put off again
            return RENEW_SECONDS
        return self._let_go()

    def _heard(self, stage: UpgradeStage, label: str) -> None:
        if stage is UpgradeStage.NONE:
            self._refused = False
        elif self._refused:
            stage, label = UpgradeStage.NONE, ""
        if stage is not self.stage:
            log.info("driver_upgrade", stage=stage.value, before=self.stage.value, label=label or self.label)
            if stage is UpgradeStage.RELEASE:
                self._release_by = boot_seconds() + PATIENCE_SECONDS
        self.stage, self.label = stage, label
        if stage is not UpgradeStage.NONE:
            since = self._cordon.since if self._cordon else now()
            self._cordon = Cordon(f"the driver is exchanged ({label})", since)

    def _let_go(self) -> float:
        """Close NVML, or keep it closed."""
        snapshot, at = self._inventory.value, boot_seconds()
        if self._until is None:
            if self._daemons_may_live() and snapshot.problem is None and at < self._release_by:
                return self._release_by - at
        elif snapshot.released_until is not None:
            self._released = True
        elif self._released and at < self._until:  # else it ran out while the labels were not known
            log.warning("driver_upgrade_refused", label=self.label, reason="release --end was asked for")
            self._until, self._released, self._refused = None, False, True
            return 0.0
        if self._until is None or self._until - at < RELEASE_SECONDS - RENEW_SECONDS + 1:
            self._until = at + RELEASE_SECONDS
            if (snapshot.released_until or 0.0) < self._until:  # a person's may last longer
                why = f"NVML is closed while the driver is exchanged (node label {self.label})"
                self._monitor.release(RELEASE_SECONDS, why)
        return RENEW_SECONDS

    def _daemons_may_live(self) -> bool:
        """Whether a GPU that no pod holds has not left its mode yet."""
        state = self._switch.value
        return state == STARTING or any(
            # A device of DRA stays one: its claims choose its mode, or nobody.
            gpu.active.mode is not gpu.wanted.mode
            if gpu.active.dra and gpu.wanted.dra
            else gpu.active.mode is not Mode.OFF and not gpu.waiting_for
            for gpu in state.gpus
        )

    def _back_in_service(self) -> None:
        self._end_release()
        # Modes are set up by NVML: not before it answers again.
        if self._inventory.value.problem is None:
            self._cordon = None
        self._put_cordons()

    def _end_release(self) -> None:
        until, released = self._until, self._inventory.value.released_until
        self._until, self._released = None, False
        if until is not None and (released is None or released <= until + 1):  # else a person's lasts longer
            self._monitor.end_release()

    def _put_cordons(self) -> None:
        cordons = dict(self._by_hand.value)
        if self._cordon:
            cordons = {state.uuid: self._cordon for state in self._inventory.value.gpus} | cordons
        if cordons != self._cordons.value:
            self._cordons.publish(MappingProxyType(cordons))
