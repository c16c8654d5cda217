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
from agent.extender.objects import as_model, decode_pod, demand_for
from agent.extender.pod_demand import PodDemand, annotations_of
from agent.extender.wire import Binding
from agent.model.demand import Impossible, Pod
from agent.model.placement import HINT_NODE, HINT_TIME, Policy, policy_of

log = structlog.get_logger()

BIND_SECONDS = (
    4.0  # less than the time between losing and giving up a lease: no late write of a former leader
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is known of a pod that is being scheduled."""

    demand: PodDemand
    policy: Policy


class NotBound(Exception):
    """A pod was not bound; the text says why, for kube-scheduler's event."""


class Binder:
    """Chooses and writes; every choice counts from the moment it is made."""

    def __init__(
        self,
        api: KubeApi,
        fleet: Fleet,
        policy: Policy,
        assume_seconds: float,
        holds: Callable[[], bool],
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._api = api
        self._fleet = fleet
        self._policy = policy
        self._seconds = assume_seconds
        self._holds = holds
        self._clock = clock
        self._open: dict[str, tuple[str, PodClaim]] = {}  # written, and no answer came

    def wish(self, pod: Pod) -> Wish:
        """What a pod wants. Raises Impossible."""
        return Wish(demand_for(pod), policy_of(pod, self._policy))

    async def bind(self, binding: Binding) -> None:
        """Raises NotBound."""
        wish = await self._wish_of(binding)
        # From here to `assume` nothing waits: no other binding can take the same units.
        claim = self._claim(binding, wish)
        annotations = annotations_of(wish.demand, claim.chosen) if claim.chosen else {}
        if annotations:
            annotations |= {HINT_TIME: str(time.time_ns()), HINT_NODE: binding.node}
        if not self._holds():
            raise NotBound("this extender is not the leader any more; try again")
        self._fleet.assume(binding.pod_uid, binding.node, claim, self._clock() + self._seconds)
        # Until the answer is here it may have been done: also when the caller hangs up meanwhile.
        self._open[binding.pod_uid] = (binding.node, claim)
        try:
            await self._write(binding, annotations)
        except ApiRefused as error:
            if error.status < 500:  # it was looked at and not done
                self._forget(binding.pod_uid)
            raise NotBound(str(error)) from error
        except ApiError as error:
            raise NotBound(str(error)) from error
        self._open.pop(binding.pod_uid, None)
        log.info(
            "pod_bound",
            pod=f"{binding.pod_namespace}/{binding.pod_name}",
            node=binding.node,
            gpu=";".join(",".join(map(str, one)) for one in claim.chosen or ()),
        )

    def _claim(self, binding: Binding, wish: Wish) -> PodClaim:
        uid = binding.pod_uid
        if where := self._fleet.where(uid):
            former = self._open.get(uid)
            if where != binding.node or former is None or former[0] != where:
                raise NotBound(f"the pod is bound to {where}, or about to be; nothing was done")
            return former[1]  # the same once more: the first write may have been lost
        self._open.pop(uid, None)
        found = self._fleet.pick(binding.node, wish.demand, wish.policy)
        if found is None:
            reason = self._fleet.verdict(binding.node, wish.demand)
            raise NotBound(f"{binding.node} has no room any more: {reason}")
        chosen = found.chosen if self._fleet.has_inventory(binding.node) else None
        return PodClaim(wish.demand, chosen=chosen, name=f"{binding.pod_namespace}/{binding.pod_name}")

    def _forget(self, uid: str) -> None:
        self._open.pop(uid, None)
        self._fleet.forget(uid)

    async def _wish_of(self, binding: Binding) -> Wish:
        # What filter was told of the pod is the caller's word; a pod is bound by what the API server says.
        path = f"/api/v1/namespaces/{binding.pod_namespace}/pods/{binding.pod_name}"
        try:
            pod = decode_pod(await self._api.get(path, deadline=BIND_SECONDS / 2))
        except (ApiError, msgspec.DecodeError) as error:
            raise NotBound(f"the pod cannot be read: {error}") from error
        if pod.metadata.uid != binding.pod_uid:
            raise NotBound("there is another pod of that name by now; nothing was done")
        try:
            wish = self.wish(as_model(pod))
        except Impossible as error:
            raise NotBound(str(error)) from error
        if wish.demand.nothing:
            raise NotBound("the pod asks for no GPU: kube-scheduler binds it by itself; see managedResources")
        return wish

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
