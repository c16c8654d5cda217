"""The embedded node with the real extender beside it, which its scheduler asks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent.cluster.api import KubeApi
from agent.simulator.kubelet import Pod
from tests.component.cluster.server import client
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.extender.replicas import Scheduler, leader


class _Asked:
    """Requests of the scheduler to the extender; one that cannot be asked leaves the pod for another try."""

    def __init__(self, rig: EmbeddedRig, replica: Scheduler) -> None:
        self._rig = rig
        self._replica = replica

    async def refuses(self, pod: Pod) -> str:
        node = self._rig.kubelet.api.node_name
        body = {"Pod": self._rig.http.pod_object(pod), "Nodes": None, "NodeNames": [node]}
        status, answer = await self._replica.post("predicates", body)
        if status != 200:
            return f"the extender answered {status}: {answer}"
        told = {**answer["FailedNodes"], **answer["FailedAndUnresolvableNodes"]}
        return str(told.get(node, "")) if node not in answer["NodeNames"] else ""

    async def bind(self, pod: Pod) -> None:
        if problem := await self._replica.bind(
            self._rig.http.pod_object(pod), self._rig.kubelet.api.node_name
        ):
            pod.message = problem


class _Connected:
    """The node's API, as the extender's client reaches it."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def client(self) -> AsyncIterator[KubeApi]:
        async with client(self._url) as api:
            yield api


@asynccontextmanager
async def extended_rig(status_tick: float = 0.5) -> AsyncIterator[EmbeddedRig]:
    """As `embedded_rig`; the extender leads before the agent has been started."""
    async with (
        embedded_rig(status_tick=status_tick) as rig,
        leader(_Connected(f"http://127.0.0.1:{rig.http.port}"), **{"lease.retrySeconds": 1}) as replica,
    ):
        rig.kubelet.scheduler.extender = _Asked(rig, replica)
        try:
            yield rig
        finally:
            rig.kubelet.scheduler.extender = None
