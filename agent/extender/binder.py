"""Bind: GPUs are chosen and the pod is bound in one write, the Binding with the choice as annotations.

The API server copies a Binding's annotations onto the pod together with the node's name.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.gangs import GangRecord, Gangs
from agent.extender.objects import WatchedPod, as_model, decode_pod, names_gpus, owner_of
from agent.extender.pod_demand import PodDemand, annotations_of, pod_demand
from agent.extender.scheduler_protocol import BindingArgs
from agent.extender.settings import BIND_SECONDS
from agent.kit.tasks import Cell
from agent.model.placement import HINT_NODE, HINT_TIME, PlacementPolicy, policy_of
from agent.model.pod import Impossible

log = structlog.get_logger()

CONFLICT = 409
NOT_LEADER = "this extender is not the leader any more; try again"
# For the binding of a replica, whose call comes a few milliseconds after it was ranked. Where it waits for
# volumes or the rest of a group this is in vain: a few times in a row, and once a second in the long run.
SIBLING_SECONDS = 0.2
MOST_IN_VAIN = 5.0
OWNERS = 256  # whose last replica is remembered


@dataclass(frozen=True, slots=True)
class PodRequest:
    demand: PodDemand
    policy: PlacementPolicy
    owner: str = ""  # whose replicas spread


class NotBound(Exception):
    """A pod was not bound; the text says why, for kube-scheduler's event."""


class Binder:
    """Chooses and writes; every choice counts from the moment it is made."""

    def __init__(
        self,
        api: KubeApi,
        fleet: Fleet,
        policy: PlacementPolicy,
        assume_seconds: float,
        holds: Callable[[], bool],
        gang_seconds: float = 60.0,
        record: GangRecord | None = None,
        *,
        spread_replicas: bool = True,
    ) -> None:
        """`gang_seconds`: how long GPUs are kept for a member of a gang before it is bound.

        `record`: where the next leader finds them; None: nowhere.
        """
        self.gangs = Gangs(fleet, gang_seconds, anyio.current_time)
        self._record = record
        self._spread_replicas = spread_replicas
        self._ranked: OrderedDict[str, str] = OrderedDict()  # by owner, the replica that was ranked last
        self._chosen = Cell(None)  # published with each choice
        self._patience = MOST_IN_VAIN  # one more comes with each second
        self._counted = -math.inf
        self._api = api
        self._fleet = fleet
        self._policy = policy
        self._seconds = assume_seconds
        self._holds = holds
        self._open: set[str] = set()  # pods whose choice was written, and no answer came

    def request(self, pod: WatchedPod) -> PodRequest:
        """Raises Impossible."""
        model = as_model(pod)
        owner = owner_of(pod) if self._spread_replicas else ""
        return PodRequest(pod_demand(model), policy_of(model, self._policy), owner)

    async def siblings_known(self, owner: str, uid: str) -> None:
        """Wait for the binding of the owner's replica that was ranked before this one.

        kube-scheduler binds a pod while it filters the next: of several replicas that come at once each would
        be ranked before the ledger knows where the former went.
        """
        former = self._ranked.pop(owner, uid)
        self._ranked[owner] = uid
        if len(self._ranked) > OWNERS:
            self._ranked.popitem(last=False)
        now = anyio.current_time()
        self._patience = min(MOST_IN_VAIN, self._patience + now - self._counted)
        self._counted = now
        if former == uid or self._patience < 1:
            return
        with anyio.move_on_after(SIBLING_SECONDS) as scope:
            while self._fleet.where(former) is None:
                await self._chosen.wait_change(self._chosen.version)
        self._patience -= scope.cancelled_caught

    async def record(self) -> None:
        """Write what is kept for gangs. Raises NotRecorded."""
        if self._record:
            await self._record.write(self.gangs.kept)

    async def bind(self, binding: BindingArgs) -> None:
        """Raises NotBound."""
        request = await self._read(binding)
        if request.demand.nothing:
            await self._bind_without_gpus(binding)
            return
        # From here to `assume` nothing waits: no other binding can take the same units.
        claim = self._claim(binding, request)
        annotations = annotations_of(request.demand, claim.chosen) if claim.chosen else {}
        if annotations:
            annotations |= {HINT_TIME: str(time.time_ns()), HINT_NODE: binding.node}
        if not self._holds():
            raise NotBound(NOT_LEADER)
        self._fleet.assume(binding.pod_uid, binding.node, claim, anyio.current_time() + self._seconds)
        self._chosen.publish(None)
        # Until the answer is here it may have been done: also when the caller hangs up meanwhile.
        self._open.add(binding.pod_uid)
        try:
            await self._write(binding, annotations)
        except ApiRefused as error:
            # It was looked at and not done. But a conflict may say that the pod is bound, by a write whose
            # answer was lost: its units count until the watch or the deadline says otherwise.
            if error.status < 500 and error.status != CONFLICT:
                self._open.discard(binding.pod_uid)
                self._fleet.forget(binding.pod_uid)
            raise NotBound(str(error)) from error
        except ApiError as error:
            raise NotBound(str(error)) from error
        self._open.discard(binding.pod_uid)
        self._fleet.confirm(binding.pod_uid, anyio.current_time())
        log.info(
            "pod_bound",
            pod=binding.pod,
            node=binding.node,
            gpu=";".join(",".join(map(str, one)) for one in claim.chosen or ()),
        )

    async def _bind_without_gpus(self, binding: BindingArgs) -> None:
        if not self._holds():
            raise NotBound(NOT_LEADER)
        try:
            await self._write(binding, {})
        except ApiError as error:
            raise NotBound(str(error)) from error
        log.info("pod_bound", pod=binding.pod, node=binding.node, gpu="")

    def _claim(self, binding: BindingArgs, request: PodRequest) -> PodClaim:
        uid = binding.pod_uid
        self._open = {one for one in self._open if self._fleet.assumed(one)}
        if kept := self.gangs.take(uid, binding.node, request.demand):
            return kept
        if where := self._fleet.where(uid):
            former = self._fleet.assumed(uid)
            if uid not in self._open or former is None or former.node != binding.node:
                raise NotBound(f"the pod is bound to {where}, or about to be; nothing was done")
            return former.claim  # the same once more: the first write may have been lost
        claim = self.choose(binding.node, request, binding.pod)
        if claim is None:
            reason = self._fleet.verdict(binding.node, request.demand)
            raise NotBound(f"{binding.node} has no room any more: {reason}")
        return claim

    def choose(self, node: str, request: PodRequest, name: str) -> PodClaim | None:
        """GPUs of a node for a pod (`name`: for people), not assumed yet; None: it does not fit."""
        found = self._fleet.pick(node, request.demand, request.policy, owner=request.owner)
        if found is None:
            return None
        chosen = found.chosen if self._fleet.inventory(node) else None
        return PodClaim(request.demand, chosen=chosen, name=name, owner=request.owner)

    async def _read(self, binding: BindingArgs) -> PodRequest:
        # The pod in filter's request is the caller's word; a pod is bound by the API server's copy.
        path = f"/api/v1/namespaces/{binding.pod_namespace}/pods/{binding.pod_name}"
        try:
            pod = decode_pod(await self._api.get(path, deadline=BIND_SECONDS / 2))
        except (ApiError, msgspec.DecodeError) as error:
            raise NotBound(f"the pod cannot be read: {error}") from error
        if pod.metadata.uid != binding.pod_uid:
            raise NotBound("there is another pod of that name by now; nothing was done")
        try:
            request = self.request(pod)
        except Impossible as error:
            raise NotBound(str(error)) from error
        # One that asks for 0 of a managed resource is bound by nobody else.
        if request.demand.nothing and not names_gpus(pod):
            raise NotBound("the pod asks for no GPU, and names no resource of ours: see managedResources")
        return request

    async def _write(self, binding: BindingArgs, annotations: dict[str, str]) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": binding.pod_name,
                "namespace": binding.pod_namespace,
                "uid": binding.pod_uid,
                "annotations": annotations,
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        path = f"/api/v1/namespaces/{binding.pod_namespace}/pods/{binding.pod_name}/binding"
        await self._api.post(path, body, BIND_SECONDS)
