"""A scheduler for one node: it counts totals, allocates claims, and asks an extender where there is one."""

import anyio
import structlog

from .api_server import Api, Extender, Pod

logger = structlog.get_logger()
UNSCHEDULABLE = "Unschedulable"


class Scheduler:
    """Binds a pod as soon as the node's totals suffice; looks again whenever anything changes."""

    def __init__(self, api: Api, latency: float) -> None:
        """`latency`: seconds from a change to what it makes the scheduler do."""
        self._api = api
        self._latency = latency
        self.extender: Extender | None = None

    async def run(self) -> None:
        """Schedule for ever, oldest pods first."""
        seen = -1
        while True:
            seen = await self._api.changes.wait_change(seen)
            await anyio.sleep(self._latency)
            self._api.release_claims()
            waiting = [pod for pod in self._api.pods.values() if pod.node_name is None and not pod.deleting]
            for pod in sorted(waiting, key=lambda each: each.sequence):
                await self._consider(pod)

    async def _consider(self, pod: Pod) -> None:
        why = self._unfit(pod) or (self.extender and await self.extender.refuses(pod))
        if why := why or self._api.allocate_claims(pod):
            message = f"0/1 nodes are available: {why}."
            if (pod.reason, pod.message) != (UNSCHEDULABLE, message):
                pod.reason, pod.message = UNSCHEDULABLE, message
                self._api.changed()
        elif self.extender:
            await self.extender.bind(pod)
        else:
            self._api.bind(pod)

    def _unfit(self, pod: Pod) -> str:
        # No pod here tolerates anything.
        untolerated = [each["key"] for each in self._api.taints if each["effect"] != "PreferNoSchedule"]
        short = [r for r in pod.spec.resources if pod.spec.request(r) and not self._fits(pod, r)]
        return ", ".join(
            [f"1 node(s) had untolerated taint {{{key}: }}" for key in untolerated]
            or [f"1 Insufficient {resource}" for resource in short]
        )

    def _fits(self, pod: Pod, resource: str) -> bool:
        free = self._api.allocatable.get(resource, 0) - self._api.used(resource)
        return pod.spec.request(resource) <= free
