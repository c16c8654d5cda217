"""Prepares and unprepares claims for the kubelet, which calls it.

An error is tried again by the kubelet after a minute or more only (kubernetes #139836). So whatever may come
right by itself is waited for: the API server, a container of before, the daemon of MPS, a GPU that recovers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.dra.claims import Bounds, ClaimRefused, asked, check_containers, devices_of
from agent.dra.ledger import ClaimCall, ClaimLedger
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Backoff, Cell
from agent.kubelet.claim_service import ClaimName, DeviceVerdict, PreparedShare
from agent.model.holding import Holder
from agent.model.modes import Assignment, GpuMode, Mode
from agent.model.pod import MPS, Pod
from agent.model.resource_claim import DRIVER, GROUP, HeldClaim, ResourceClaim, pool_of
from agent.modes.planner import STARTING, SwitchState
from agent.modes.wing import NotYet, SetUpFailed, Wing
from agent.modes.withholding import CORDONED
from agent.pairing.pod_source import PodSource, PodsUnavailable

log = structlog.get_logger()

PREPARE_SECONDS = 40.0  # the kubelet gives a call up after 45
CALL_SECONDS = 2.0
LOOK_SECONDS = 0.1

Answers = dict[str, Sequence[PreparedShare] | str]


@dataclass(slots=True)
class DriverStats:
    """Counters, read by metrics."""

    prepares: dict[str, int] = field(default_factory=dict)  # by outcome
    seconds: float = 0.0  # of those that were prepared


class ClaimReports:
    """Reports to people about claims. This one has nobody to report to."""

    def refused(self, name: ClaimName, claim: ResourceClaim | None, problem: str) -> None:
        """A claim was not prepared."""

    def prepared(self, name: ClaimName, claim: ResourceClaim | None) -> None:
        """A claim was prepared."""


class ClaimPreparer:
    """The driver, as `agent.kubelet.claim_service.ClaimDriver` has it."""

    name = DRIVER

    def __init__(
        self,
        node: str,
        api: KubeApi,
        pods: PodSource,
        wings: Mapping[Mode, Wing],
        inventory: Cell[Snapshot],
        assignment: Cell[Assignment],
        switch: Cell[SwitchState],
        ledger: ClaimLedger,
        reports: ClaimReports,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed`: the kubelet's records are about to change."""
        self._node = node
        self._api = api
        self._pods = pods
        self._wings = wings
        self._inventory = inventory
        self._assignment = assignment
        self._switch = switch
        self._ledger = ledger
        self._reports = reports
        self._changed = changed
        self.pool = pool_of(node)
        self.health: Cell[Sequence[DeviceVerdict]] = Cell(())
        self.stats = DriverStats()
        self.asked_pods: dict[str, None] = {}  # UIDs of pods for which prepare was called, the oldest first

    async def prepare(self, claims: Sequence[ClaimName]) -> Answers:
        """The devices of each claim, or why there are none."""
        calls = {uid: self._ledger.begin(uid) for uid in {each.uid for each in claims}}
        try:
            return await self._prepare(claims, calls)
        finally:
            for call in calls.values():
                self._ledger.end(call)

    async def _prepare(self, claims: Sequence[ClaimName], calls: Mapping[str, ClaimCall]) -> Answers:
        started = perf_counter()
        answers: Answers = {}
        read: dict[str, ResourceClaim] = {}
        held: dict[str, HeldClaim] = {}
        deadline = anyio.current_time() + PREPARE_SECONDS
        async with anyio.create_task_group() as group:
            for name in claims:
                group.start_soon(self._read, name, deadline, read, held, answers)
        pods = await self._pods_of(read.values())
        await self._check(pods, held, answers)
        async with anyio.create_task_group() as group:
            for name in claims:
                if name.uid in held and name.uid not in answers:
                    owned = name.uid in read and read[name.uid].owned
                    call, claim = calls[name.uid], held[name.uid]
                    group.start_soon(self._made_ready, call, claim, pods, owned, deadline, answers)
        for name in claims:
            answer = answers[name.uid]
            outcome = "refused" if isinstance(answer, str) else "prepared"
            self.stats.prepares[outcome] = self.stats.prepares.get(outcome, 0) + 1
            fields = {"claim": f"{name.namespace}/{name.name}", "uid": name.uid}
            if isinstance(answer, str):
                log.warning("claim_refused", **fields, problem=answer)
                self._reports.refused(name, read.get(name.uid), answer)
            else:
                self.stats.seconds += perf_counter() - started
                log.info("claim_prepared", **fields, devices=[each.device for each in answer])
                self._reports.prepared(name, read.get(name.uid))
        self._changed()
        return answers

    async def unprepare(self, claims: Sequence[ClaimName]) -> None:
        for name in claims:
            known = name.uid in self._ledger.held.value
            self._ledger.unprepared(name.uid, (name.namespace, name.name))
            log.info("claim_unprepared", claim=f"{name.namespace}/{name.name}", uid=name.uid, known=known)
        self._changed()

    async def _read(
        self,
        name: ClaimName,
        deadline: float,
        read: dict[str, ResourceClaim],
        held: dict[str, HeldClaim],
        answers: Answers,
    ) -> None:
        """A claim's devices: as they were answered before, or as the API server has them."""
        known = self._ledger.held.value.get(name.uid)
        if known is not None and name.uid not in self._ledger.unanswered:
            held[name.uid] = known
            # For whose pods it is, which a wing may have to know; its devices stay as they were answered.
            with suppress(ClaimRefused):
                claim = await self._claim(name, min(deadline, anyio.current_time() + CALL_SECONDS))
                if claim.metadata.uid == name.uid:
                    read[name.uid] = claim
            return
        try:
            claim = read[name.uid] = await self._claim(name, deadline)
            for each in claim.status.reserved_for:
                self.asked_pods[each.uid] = None
            while len(self.asked_pods) > 1024:
                del self.asked_pods[next(iter(self.asked_pods))]
            with anyio.CancelScope(deadline=deadline):  # an agent that starts knows no GPU yet
                await self._inventory.wait_for(lambda now: bool(now.gpus))
            held[name.uid] = asked(claim, name.uid, self.pool, self._bounds())
        except ClaimRefused as error:
            answers[name.uid] = str(error)

    async def _claim(self, name: ClaimName, deadline: float) -> ResourceClaim:
        """Raises ClaimRefused. The API server is waited for."""
        path = f"/apis/{GROUP}/namespaces/{name.namespace}/resourceclaims/{name.name}"
        backoff = Backoff(first=0.1, longest=2.0)
        while True:
            try:
                return msgspec.json.decode(
                    await self._api.get(path, deadline=CALL_SECONDS), type=ResourceClaim
                )
            except msgspec.DecodeError as error:
                raise ClaimRefused(
                    f"claim {name.namespace}/{name.name} is not understood: {error}"
                ) from error
            except ApiError as error:
                status = error.status if isinstance(error, ApiRefused) else 0
                pause = backoff.next()
                if (400 <= status < 500 and status != 429) or anyio.current_time() + pause > deadline:
                    text = f"claim {name.namespace}/{name.name} cannot be read: {error}"
                    raise ClaimRefused(text) from error
            await anyio.sleep(pause)

    def _bounds(self) -> Mapping[str, Bounds]:
        return {
            state.uuid.lower(): Bounds(state.uuid, MPS.blocks(state.gpu.memory_bytes))
            for state in self._inventory.value.gpus
        }

    async def _pods_of(self, claims: Iterable[ResourceClaim]) -> list[Pod]:
        """The pods of this node that claims are reserved for, as far as they are known."""
        wanted = {
            (claim.metadata.namespace, each.name): each.uid
            for claim in claims
            for each in claim.status.reserved_for
            if each.resource == "pods"
        }
        shown = {pod.key: pod for pod in self._pods.pods_on_node()}
        found = [shown[key] for key, uid in wanted.items() if key in shown and shown[key].uid == uid]
        known = {pod.key for pod in found if pod.claimed_devices()}
        with anyio.move_on_after(CALL_SECONDS):  # the kubelet may have a pod before our watch has
            for key in () if known else wanted:
                try:
                    pod = await self._pods.fetch(*key)
                except PodsUnavailable as error:
                    log.info("pod_of_claim_unknown", pod="/".join(key), problem=str(error))
                    continue
                if pod and pod.uid == wanted[key] and pod.spec.node_name == self._node:
                    found.append(pod)
        return found

    async def _check(self, pods: Sequence[Pod], held: Mapping[str, HeldClaim], answers: Answers) -> None:
        """Refuse claims that one of their pods cannot use together with others that it has."""
        for pod in pods:
            others = [each for each in self._ledger.held.value.values() if each.namespace == pod.namespace]
            mine = [each for each in held.values() if each.namespace == pod.namespace]
            try:
                check_containers(pod, [*others, *mine])
            except ClaimRefused as error:
                names = {name for _, name, _ in pod.claimed_devices()}
                for each in mine:
                    if each.name in names and each.uid not in self._ledger.held.value:
                        answers[each.uid] = str(error)

    async def _made_ready(
        self,
        call: ClaimCall,
        claim: HeldClaim,
        pods: Sequence[Pod],
        owned: bool,
        deadline: float,
        answers: Answers,
    ) -> None:
        done = False
        why = ""
        try:
            with anyio.CancelScope(deadline=deadline):
                why = self._ledger.obstacle(claim)
                # A kubelet that has restarted prepares again what containers have been using all the time.
                known = claim.uid in self._ledger.held.value and claim.uid not in self._ledger.unanswered
                for uuid in sorted(claim.gpus):
                    self._given(claim, uuid, known=known)
                if not await self._ledger.enter(call, claim):
                    raise ClaimRefused(_given_back(claim))
                why = ""
                for uuid in sorted(claim.gpus):
                    await self._switched(claim, uuid, known=known)
                while not done:
                    try:
                        answers[claim.uid] = self._answer(claim, pods, owned=owned)
                        done = True
                    except NotYet as error:  # a daemon that has just ended is started again
                        why = str(error)
                        await anyio.sleep(LOOK_SECONDS)
        except (ClaimRefused, SetUpFailed) as error:
            answers[claim.uid] = str(error)
        finally:
            if not done:  # the request's other claims may wait on
                self._ledger.end(call)
        if done and not self._ledger.answered(call, claim):
            answers[claim.uid] = _given_back(claim)
        if claim.uid not in answers:
            late = self._ledger.obstacle(claim) or why or self._late(claim)
            answers[claim.uid] = f"{claim} is not ready after {PREPARE_SECONDS:g} s: {late}"

    def _given(self, claim: HeldClaim, uuid: str, *, known: bool) -> None:
        """Raises ClaimRefused where a GPU is not, or will not stay, a device of DRA."""
        switch = self._switch.value
        gpu = next((each for each in switch.gpus if each.uuid == uuid), None)
        if switch != STARTING and gpu and not gpu.wanted.dra and not known:
            raise ClaimRefused(
                f"GPU {gpu.index} ({uuid}) of {claim} is being taken from DRA for mode "
                f"{gpu.wanted.mode.value}: delete the pod, and the scheduler finds another GPU"
            )

    async def _switched(self, claim: HeldClaim, uuid: str, *, known: bool) -> None:
        """Return once a GPU is in the mode of a claim, and well. Raises ClaimRefused."""
        mode = next(each.share.mode for each in claim.devices if each.share.gpu == uuid)

        def well() -> bool:
            state = self._inventory.value.by_uuid.get(uuid)
            return known or bool(state and state.healthy)

        if _serves(self._assignment.value.of(uuid), mode, known=known) and well():
            return
        refused: list[ClaimRefused] = []
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                async for _ in self._switch.values():
                    try:
                        self._given(claim, uuid, known=known)
                    except ClaimRefused as error:
                        refused.append(error)
                        group.cancel_scope.cancel()

            group.start_soon(watch)
            await self._assignment.wait_for(lambda now: _serves(now.of(uuid), mode, known=known))
            await self._inventory.wait_for(lambda _: well())
            group.cancel_scope.cancel()
        if refused:
            raise refused[0]

    def _late(self, claim: HeldClaim) -> str:
        """The reasons for which a claim still waits, in words."""
        found = []
        for uuid in sorted(claim.gpus):
            state = self._inventory.value.by_uuid.get(uuid)
            gpu = next((each for each in self._switch.value.gpus if each.uuid == uuid), None)
            if state and not state.healthy:
                found.append(f"GPU {uuid} is unhealthy: {state.cause}")
            elif gpu and gpu.problem:
                found.append(gpu.problem)
            else:
                found.append(f"GPU {uuid} has not come into its mode")
        return "; ".join(found)

    def _answer(self, claim: HeldClaim, pods: Sequence[Pod], *, owned: bool) -> list[PreparedShare]:
        """Raises SetUpFailed."""
        containers: dict[str, list[Holder]] = {}
        for pod in pods:
            for container, devices in devices_of(pod, {claim.name: claim}).items():
                for device in devices:
                    holder = Holder(pod.namespace, pod.name, container)
                    containers.setdefault(device.device, []).append(holder)
        return [
            PreparedShare(
                (each.request,) if each.request else (),
                each.pool,
                each.device,
                each.share.share_id,
                tuple(
                    self._wings[each.share.mode].claimed(
                        each.share, containers.get(each.device, ()), owned=owned
                    )
                ),
            )
            for each in claim.devices
        ]


def _given_back(claim: HeldClaim) -> str:
    return f"{claim} was given back while it was prepared"


def _serves(now: GpuMode, mode: Mode, *, known: bool) -> bool:
    """Whether a GPU is in a mode for claims. One that was allocated before a cordon is let in, as by plugins.

    On one that is closed otherwise there may be a process that outlives its pod.
    """
    open_to_it = known or now.claimable or now.reason.startswith(CORDONED)
    return now.dra and now.mode is mode and open_to_it
