"""MPS: shares of a GPU as `nvidia.com/mps-core` (1 %) and `nvidia.com/mps-memory` (1 GiB), behind its daemon.

Both are required, on one GPU: the pairing is that of vGPU. Limits hold for each CUDA process of a container,
not for the container as a whole: MPS knows processes only (docs/mps.md).
"""

from collections.abc import Sequence

import anyio

from agent.injection.inject import Injector
from agent.kit.tasks import follow
from agent.kubelet.wire import Allocation, Reason, Refused
from agent.lists.shared_pair import SharedPair, SharedPairPlugin, Sharing, pairing_of
from agent.model.cuda import PIPE_DIRECTORY, client_ceiling, limits
from agent.model.gpu import Gpu
from agent.model.holding import Holder, PairMember
from agent.model.modes import BadDeviceId, Mode, parse
from agent.model.pod import MPS
from agent.modes.wing import Node
from agent.mps import shares_cdi
from agent.mps.daemon_manager import DaemonManager
from agent.mps.pods import RootCheck
from agent.pairing.pair_rules import Grant

WAIT_SECONDS = 25.0  # the kubelet gives PreStartContainer 30


class Conditions(Sharing):
    """Additions of MPS to the pair of resources: when it is offered, and what a container gets."""

    def __init__(self, node: Node, daemons: DaemonManager) -> None:
        configured = node.settings.mps
        super().__init__(MPS, Mode.MPS, trim=not node.settings.cluster.extender)
        self.pairing = pairing_of(node, MPS, configured.placement, configured.reservation_seconds)
        self._daemons = daemons
        self._inventory = node.snapshot
        self._injector = node.injector
        self._most_clients = configured.most_clients
        self._caps_must_hold = configured.advisory_caps == "refuse"

    def unready(self, uuid: str) -> str:
        return self._advisory() or self._daemons.unready(uuid)

    def _advisory(self) -> str:
        """Why caps would not hold, where they must; empty: they do, or need not."""
        problem = self._injector.caps_problem if self._caps_must_hold else None
        return f"caps would be advisory, which mps.advisoryCaps refuses: {problem}" if problem else ""

    def ceiling(self, uuid: str) -> int:
        """How many containers may hold shares of a GPU at once."""
        state = self._inventory.value.by_uuid.get(uuid)
        return self.most_holders(state.gpu) if state else 0

    def most_holders(self, gpu: Gpu) -> int:
        most = client_ceiling(gpu, self._inventory.value.driver)
        return most if self._most_clients is None else min(most, self._most_clients)

    def full(self, uuid: str) -> str:
        """Why no more shares of a GPU are offered now, in words; empty: they are."""
        ledger = self.pairing.ledger
        pool = ledger.pools.get(uuid)
        if pool is None:
            return ""
        held = [each for each in ledger.held.cores if each.id_set & pool.core_set]
        holders = {each.holder for each in held if each.listed}
        # Init containers run one by one, before the others of their pod: one client for all of them.
        pods = {each.pod_key for each in holders}
        alone = {each.holder.pod_key: each.holder for each in held if each.holder.pod_key not in pods}
        holders.update(alone.values())
        # A reservation counts once both members are granted: the second member must still be on its list.
        holders |= {each.holder for each in ledger.reservations if each.complete and uuid in each.gpus}
        most = self.ceiling(uuid)
        return f"{len(holders)} containers hold shares, and MPS serves {most}" if len(holders) >= most else ""

    async def additions(self, member: PairMember, grant: Grant, gpus: Sequence[Gpu]) -> Allocation:
        return self.extras(member, tuple(grant.ids), gpus)

    def extras(self, member: PairMember, ids: Sequence[str], gpus: Sequence[Gpu]) -> Allocation:
        """The daemon's sockets and the cap on cores from one member, the cap on memory from the other."""
        (gpu,) = gpus
        if why := self._advisory():
            raise Refused(why)
        if self._injector.own_cdi:
            return Allocation(cdi_devices=shares_cdi.devices(member, gpu.uuid, len(ids)))
        if member is PairMember.MEMORY:
            return Allocation(environment=limits(0, len(ids)))
        return Allocation(
            environment={PIPE_DIRECTORY: shares_cdi.PIPE_IN_CONTAINER, **limits(len(ids), 0)},
            mounts=shares_cdi.mounts(self._daemons, gpu.uuid),
        )


class MpsPlugin(SharedPairPlugin):
    """One member of the pair; containers start once their daemon serves. That of the cores keeps both."""

    def __init__(
        self,
        shares: SharedPair,
        member: PairMember,
        injector: Injector,
        daemons: DaemonManager,
        root_check: RootCheck | None = None,
    ) -> None:
        super().__init__(shares, member, injector)
        self._root_check = root_check
        # Both members are always asked for: one of them waits for the daemon.
        self.needs_pre_start = member is PairMember.CORE
        self._daemons = daemons

    async def run(self) -> None:
        """Keep the list true, to the daemons' life too."""
        async with anyio.create_task_group() as group:
            group.start_soon(super().run)
            group.start_soon(follow, self.refresh, self._daemons.statuses, self._injector.looked)

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Wait until the daemon serves: a container without it would fail, or run without limits."""
        holders = await self._holders(frozenset(ids))
        try:
            await self._wait_startable(holders, ids)
        except Refused as refusal:
            for pod in {holder.pod_key for holder in holders}:
                self._shares.pairing.report_waiting(pod, str(refusal), refusal.reason.value)
            raise

    async def _wait_startable(self, holders: Sequence[Holder], ids: Sequence[str]) -> None:
        for holder in holders:
            self._refuse_half(holder)
        self._refuse_root(holders, len(ids))
        for uuid in {_gpu_of(each) for each in ids}:
            with anyio.move_on_after(WAIT_SECONDS):
                await self._daemons.wait_serving(uuid)
                continue
            raise Refused(
                f"the MPS control daemon of GPU {uuid} did not serve within {WAIT_SECONDS:g} s: "
                f"{self._daemons.unready(uuid)}; the container is tried again; where this lasts, see the "
                "event MPSDaemonFailed of the node",
                Reason.UNAVAILABLE,
            )

    async def _holders(self, ids: frozenset[str]) -> list[Holder]:
        """The containers that these cores were handed to: one of them starts.

        There are several where a container inherited all that an init container had. None: it was an init
        container, and the kubelet's checkpoint cannot be read.
        """
        pairing = self._shares.pairing
        await pairing.reconcile()
        ledger = pairing.ledger
        found = [each.holder for each in ledger.reservations if each.core_ids == ids]
        return found + [each.holder for each in ledger.held.cores if each.id_set == ids]

    def _refuse_half(self, holder: Holder) -> None:
        """Without the API server it shows only now that a container asks for cores alone."""
        ledger = self._shares.pairing.ledger
        reservation = ledger.reservation(holder)
        granted = reservation is not None and PairMember.MEMORY in reservation.granted
        if granted or any(each.holder == holder for each in ledger.held.blocks):
            return
        raise Refused(
            f"{holder} asks for {MPS.core} without {MPS.memory}, and would run without a limit of memory: "
            f"add {MPS.memory} to its limits"
        )

    def _refuse_root(self, holders: Sequence[Holder], cores: int) -> None:
        """Root in a container reaches the control socket, and could change its own limits and others'."""
        if self._root_check is None:
            return
        if not holders:
            # What is true of all that it could be is true of it.
            held = self._shares.pairing.ledger.held
            known = {each.holder for each in (*held.cores, *held.blocks)}
            if why := self._root_check.unnamed(cores, known):
                raise Refused(
                    f"it is not known whose {cores} {self.resource} these are, and {why}, which mps.rootPods "
                    "refuses; the container is tried again",
                    Reason.UNAVAILABLE,
                )
            return
        for holder in holders:
            if why := self._root_check.named(holder.namespace, holder.pod, holder.container):
                raise Refused(
                    f"{holder} may run as root ({why}), which mps.rootPods refuses: set runAsNonRoot: true "
                    "or a runAsUser above 0 in its security context"
                )


def build(
    node: Node, daemons: DaemonManager, root_check: RootCheck | None = None
) -> tuple[Conditions, list[MpsPlugin]]:
    """The conditions, and both members of the pair."""
    conditions = Conditions(node, daemons)
    shares = SharedPair(conditions, node.snapshot, node.assignment, conditions.pairing, node.holdings.cell)
    return (
        conditions,
        [MpsPlugin(shares, member, node.injector, daemons, root_check) for member in PairMember],
    )


def _gpu_of(text: str) -> str:
    try:
        return parse(text).gpu
    except BadDeviceId as error:
        raise Refused(str(error)) from error
