"""Has the kubelet prepare again what it would leave for a minute or more.

It does so after any failure, its own ones too: the API server may not know yet that a claim is for a pod of
its node (403), or no driver was there. A change of the pod, as of an annotation, sets it going at once.
"""

from collections.abc import Collection, Iterator, Mapping

import anyio
import structlog

from agent.cluster.api import ApiError, KubeApi, now
from agent.cluster.pods import PodCache
from agent.kit.tasks import Cell
from agent.model.pod import Pod
from agent.model.resource_claim import DRIVER, GROUP, HeldClaim, ResourceClaim

log = structlog.get_logger()

ANNOTATION = "gpu-node-agent.io/prepare-again"
LOOK_SECONDS = 0.5
FIRST_SECONDS = 2.0  # an undisturbed kubelet calls within a second
LONGEST_SECONDS = 30.0
MOST_AT_ONCE = 20


class PodNudges:
    """Looks for pods whose claims of ours nobody prepares."""

    def __init__(
        self, api: KubeApi, pods: PodCache, asked: Collection[str], held: Cell[Mapping[str, HeldClaim]]
    ) -> None:
        """`asked`: UIDs of pods for which prepare was called. `held`: claims that are prepared."""
        self._api = api
        self._pods = pods
        self._asked = asked
        self._held = held
        self._due: dict[str, tuple[float, float]] = {}  # by UID: when, and the pause behind it
        self.nudges = 0
        self.problem = ""

    async def run(self) -> None:
        while True:
            await self.look()
            await anyio.sleep(LOOK_SECONDS if self._due else FIRST_SECONDS / 2)

    async def look(self) -> None:
        """Annotate those that have waited for long enough."""
        waiting = {pod.uid: pod for pod in self._waiting()}
        moment = anyio.current_time()
        self._due = {uid: self._due.get(uid, (moment + FIRST_SECONDS, FIRST_SECONDS)) for uid in waiting}
        late = [uid for uid, (due, _) in self._due.items() if due <= moment][:MOST_AT_ONCE]
        for uid in late:
            pause = min(2 * self._due[uid][1], LONGEST_SECONDS)
            self._due[uid] = (moment + pause, pause)
            try:
                if await self._ours(waiting[uid]):
                    await self._nudge(waiting[uid])
                    self.problem = ""
            except ApiError as error:
                if error.status not in (404, 409) and str(error) != self.problem:
                    self.problem = str(error)
                    log.warning("pod_not_nudged", pod="/".join(waiting[uid].key), problem=self.problem)

    def _waiting(self) -> Iterator[Pod]:
        held = {each.key for each in self._held.value.values()}
        for pod in self._pods.pods().values():
            waits = pod.pending and pod.uid not in self._asked and not pod.container_names
            if waits and {(pod.namespace, name) for _, name, _ in pod.claimed_devices()} - held:
                yield pod

    async def _ours(self, pod: Pod) -> bool:
        """Whether a claim of a pod has devices of ours and is for it."""
        for name in {name for _, name, _ in pod.claimed_devices()}:
            path = f"/apis/{GROUP}/namespaces/{pod.namespace}/resourceclaims/{name}"
            status = (await self._api.read(path, ResourceClaim)).status
            results = status.allocation.devices.results if status.allocation else ()
            if any(each.driver == DRIVER for each in results):
                return any(each.uid == pod.uid for each in status.reserved_for)
        return False

    async def _nudge(self, pod: Pod) -> None:
        # The UID makes the server refuse the patch for a later pod of the same name.
        body = {"metadata": {"uid": pod.uid, "annotations": {ANNOTATION: now()}}}
        await self._api.merge_patch(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", body)
        self.nudges += 1
        log.info("pod_nudged", pod="/".join(pod.key), reason="the kubelet has not prepared its claims")
