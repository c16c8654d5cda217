"""Bind: GPUs are chosen and the pod is bound in one write, the Binding with the choice as annotations.

The API server copies a Binding's annotations onto the pod together with the node's name.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import msgspec
import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.gangs import Gangs
from agent.extender.objects import as_model, decode_pod, demand_for
from agent.extender.pod_demand import PodDemand, annotations_of
from agent.extender.scheduler_protocol import Binding
from agent.model.demand import Impossible, Pod
from agent.model.placement import HINT_NODE, HINT_TIME, PlacementPolicy, policy_of

log = structlog.get_logger()

CONFLICT = 409
BIND_SECONDS = (
    4.0  # less than the time between losing and giving up a lease: no late write of a former leader
)


@dataclass(frozen=True, slots=True)
class PodRequest:
    demand: PodDemand
    policy: PlacementPolicy


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
    ) -> None:
        """`gang_seconds`: how long GPUs are kept for a member of a gang before it is bound."""
        self.gangs = Gangs(fleet, gang_seconds, anyio.current_time)
        self._api = api
        self._fleet = fleet
        self._policy = policy
        self._seconds = assume_seconds
        self._holds = holds
        self._open: dict[str, tuple[str, PodClaim]] = {}  # written, and no answer came

    def request(self, pod: Pod) -> PodRequest:
        """The demand of a pod. Raises Impossible."""
        return PodRequest(demand_for(pod), policy_of(pod, self._policy))

    async def bind(self, binding: Binding) -> None:
        """Raises NotBound."""
        request = await self._read(binding)
        # From here to `assume` nothing waits: no other binding can take the same units.
        claim = self._claim(binding, request)
        annotations = annotations_of(request.demand, claim.chosen) if claim.chosen else {}
        if annotations:
            annotations |= {HINT_TIME: str(time.time_ns()), HINT_NODE: binding.node}
        if not self._holds():
            raise NotBound("this extender is not the leader any more; try again")
        self._fleet.assume(binding.pod_uid, binding.node, claim, anyio.current_time() + self._seconds)
        # Until the answer is here it may have been done: also when the caller hangs up meanwhile.
        self._open[binding.pod_uid] = (binding.node, claim)
        try:
            await self._write(binding, annotations)
        except ApiRefused as error:
            # It was looked at and not done. But a conflict may say that the pod is bound, by a write whose
            # answer was lost: its units count until the watch or the deadline says otherwise.
            if error.status < 500 and error.status != CONFLICT:
                self._forget(binding.pod_uid)
            raise NotBound(str(error)) from error
        except ApiError as error:
            raise NotBound(str(error)) from error
        self._open.pop(binding.pod_uid, None)
        log.info(
            "pod_bound",
            pod=binding.pod,
            node=binding.node,
            gpu=";".join(",".join(map(str, one)) for one in claim.chosen or ()),
        )

    def _claim(self, binding: Binding, request: PodRequest) -> PodClaim:
        uid = binding.pod_uid
        self._open = {one: written for one, written in self._open.items() if self._fleet.where(one)}
        if kept := self.gangs.take(uid, binding.node, request.demand):
            return kept
        if where := self._fleet.where(uid):
            former = self._open.get(uid)
            if where != binding.node or former is None or former[0] != where:
                raise NotBound(f"the pod is bound to {where}, or about to be; nothing was done")
            return former[1]  # the same once more: the first write may have been lost
        self._open.pop(uid, None)
        claim = self.choose(binding.node, request, binding.pod)
        if claim is None:
            reason = self._fleet.verdict(binding.node, request.demand)
            raise NotBound(f"{binding.node} has no room any more: {reason}")
        return claim

    def choose(self, node: str, request: PodRequest, name: str) -> PodClaim | None:
        """GPUs of a node for a pod (`name`: for people), not assumed yet; None: it does not fit."""
        found = self._fleet.pick(node, request.demand, request.policy)
        if found is None:
            return None
        chosen = found.chosen if self._fleet.inventory(node) else None
        return PodClaim(request.demand, chosen=chosen, name=name)

    def _forget(self, uid: str) -> None:
        self._open.pop(uid, None)
        self._fleet.forget(uid)

    async def _read(self, binding: Binding) -> PodRequest:
        # The pod in filter's request is the caller's word; a pod is bound by the API server's copy.
        path = f"/api/v1/namespaces/{binding.pod_namespace}/pods/{binding.pod_name}"
        try:
            pod = decode_pod(await self._api.get(path, deadline=BIND_SECONDS / 2))
        except (ApiError, msgspec.DecodeError) as error:
            raise NotBound(f"the pod cannot be read: {error}") from error
        if pod.metadata.uid != binding.pod_uid:
            raise NotBound("there is another pod of that name by now; nothing was done")
        try:
            request = self.request(as_model(pod))
        except Impossible as error:
            raise NotBound(str(error)) from error
        if request.demand.nothing:
            raise NotBound("the pod asks for no GPU: kube-scheduler binds it by itself; see managedResources")
        return request

    async def _write(self, binding: Binding, annotations: dict[str, str]) -> None:
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
