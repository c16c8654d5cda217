"""The node's pods and their owners by way of the Kubernetes API. Imported only where there is one."""

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from http import HTTPStatus

import anyio
import structlog

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi
from agent.cluster.event_recorder import Event, EventRecorder, Regarding
from agent.cluster.pods import HASH_ANNOTATION, PodCache
from agent.cluster.reviews import lacks_right
from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import PodKey, View
from agent.kit.tasks import Backoff
from agent.model.cgroup import STATIC_UID
from agent.model.pod import Pod
from agent.pairing.pairing import Recorder
from agent.pairing.pod_source import PodSource, PodsUnavailable

log = structlog.get_logger()

WAITING_PATCHES = 256
REMEMBERED = 1024  # UIDs of pods that are over; the watch shows these ends much earlier
# Between tries while the agent's account lacks the right to patch pods.
DENIED_SECONDS, DENIED_LONGEST_SECONDS = 30.0, 600.0


class ClusterPods(PodSource):
    """The node's pods from the watch, for pairing and for the record of who holds what."""

    answers = True

    def __init__(self, cache: PodCache) -> None:
        self._cache = cache
        # UIDs of which the API server has said that they are over, ahead of the watch; the oldest first.
        self._over: dict[str, None] = {}

    @property
    def node(self) -> str:
        return self._cache.node

    def view(self) -> View:
        """The pods by the UIDs that their cgroups carry."""
        known, reflector = self._cache.cgroup_uids(), self._cache.reflector
        heard = -math.inf if reflector.heard is None else reflector.heard
        # Such a copy is older than the answer, and no UID comes twice.
        over = self._over.keys() & known.pods.keys()
        pods = {uid: pod for uid, pod in known.pods.items() if uid not in over} if over else known.pods
        current = self.current()
        return View(pods, current, known.contested, heard, self._over.keys(), away=not current)

    def current(self) -> bool:
        reflector = self._cache.reflector
        return reflector.synced and reflector.problem is None

    def pods_on_node(self) -> Collection[Pod]:
        pods = self._cache.pods()
        over = self._over.keys() & pods.keys()
        return [pod for uid, pod in pods.items() if uid not in over] if over else pods.values()

    def inform(self, record: HoldingsWatch) -> None:
        """Have the record of who holds what know the pods of its node."""
        record.view, record.pod_changes = self.view, self._cache.reflector.items
        record.ask_after = self.ask_after

    async def get(self, namespace: str, name: str) -> Pod | None:
        """One pod by a GET, unless the watch has shown it meanwhile."""
        try:
            pod = await self._cache.get(namespace, name)
        except ApiError as error:
            raise _unavailable(error) from error
        return await self.fetch(namespace, name) if pod and pod.uid in self._over else self._bound(pod)

    async def fetch(self, namespace: str, name: str) -> Pod | None:
        return self._bound(await self._read(namespace, name))

    def _bound(self, pod: Pod | None) -> Pod | None:
        """None for one of no node, or another: the kubelet may list the last of its name, and admits none."""
        return pod if pod and pod.spec.node_name == self.node else None

    async def _read(self, namespace: str, name: str) -> Pod | None:
        try:
            return await self._cache.fetch(namespace, name)
        except ApiError as error:
            raise _unavailable(error) from error

    async def list_now(self) -> Collection[Pod]:
        try:
            return await self._cache.list_now()
        except ApiError as error:
            raise _unavailable(error) from error

    async def ask_after(self, pods: Mapping[str, PodKey], listed: Collection[PodKey] = ()) -> None:
        """Ask for pods by their UIDs, each by its name: the next view knows which are over.

        A pod of a `listed` name without any object may have been deleted by force, and runs.

        Nothing is learnt of static pods, whose objects are mirrors, nor where the API server does not answer.
        """

        async def ask(uid: str, key: PodKey) -> None:
            with suppress(PodsUnavailable):
                now = await self._read(*key)
                gone = key not in listed if now is None else now.uid != uid and not _mirrors(now, uid)
                if gone or (now and now.finished):
                    self._over[uid] = None
                    log.info("pod_is_over", pod="/".join(key), uid=uid)

        known = self._cache.cgroup_uids()
        async with anyio.create_task_group() as group:
            for uid, key in pods.items():
                mirrors = uid in known.contested or (uid in known.pods and known.pods[uid].uid != uid)
                # Mirrors of static pods come and go while these run.
                if not (mirrors or STATIC_UID.fullmatch(uid) or uid in self._over):
                    group.start_soon(ask, uid, key)
        while len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]


def _unavailable(error: ApiError) -> PodsUnavailable:
    passing = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR or error.status == HTTPStatus.TOO_MANY_REQUESTS
    return PodsUnavailable(str(error), away=passing or isinstance(error, ApiUnavailable))


def _mirrors(pod: Pod, uid: str) -> bool:
    """Whether an object claims to be the mirror of this static pod: nothing follows, true or not."""
    return pod.metadata.annotations.get(HASH_ANNOTATION) == uid


def _about(pod: Pod) -> Regarding:
    return Regarding("Pod", pod.name, pod.namespace, pod.uid)


class ClusterRecorder(Recorder):
    """Events for what was refused or passed over; the choice as gpu-admission's annotations on the pod."""

    def __init__(self, api: KubeApi, events: EventRecorder, write_choice: bool) -> None:
        self._api = api
        self._events = events
        self._write_choice = write_choice
        # Annotations to be written, by UID, and to what: whole pods would stay while the right is lacking.
        self._waiting: dict[str, tuple[Regarding, dict[str, str]]] = {}
        self._refused: dict[str, dict[str, str]] = {}  # those that the server refused, by UID
        self._news = anyio.Event()
        self._granted_until = -math.inf  # time of the loop: the right to patch pods is not looked at before

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """All of a pod's in one patch, written by `run`; the oldest pod gives way where too many wait.

        What was refused before comes along, so that `gpu-assigned` never stands without each of the choices.
        """
        if self._write_choice:
            self._add(_about(pod), annotations)

    def _add(self, pod: Regarding, annotations: Mapping[str, str]) -> None:
        _, newer = self._waiting.pop(pod.uid, (pod, self._refused.pop(pod.uid, {})))
        if len(self._waiting) == WAITING_PATCHES:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[pod.uid] = (pod, {**newer, **annotations})
        self._news.set()

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
        self._events.emit(Event(_about(pod), reason, message, warning=warning, key=key))

    async def run(self) -> None:
        """Write choices to pods for ever.

        A refusal of one pod leaves the others alone. Without the right to patch pods it says so once, and
        tries again with growing pauses: choices wait meanwhile, so that they are written when it is granted.
        """
        backoff = Backoff(first=0.2, longest=30.0, jitter=0.5)
        denied = Backoff(DENIED_SECONDS, DENIED_LONGEST_SECONDS)
        lacking = False
        while True:
            if not self._waiting:
                self._news = anyio.Event()
                await self._news.wait()
            pod, annotations = self._waiting.pop(next(iter(self._waiting)))
            path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
            # The UID makes the server refuse the patch for a later pod of the same name.
            body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
            try:
                await self._api.merge_patch(path, body)
            except ApiError as error:
                status = error.status if isinstance(error, ApiRefused) else 0
                forbidden = status == HTTPStatus.FORBIDDEN
                if forbidden and await self._lacks_right(pod):
                    if not lacking:
                        log.warning("choice_not_written", problem=str(error), remedy="grant patch on pods")
                    lacking = True
                    self._put_back(pod, annotations)
                    await anyio.sleep(denied.next())
                elif 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS:
                    log.info("choice_not_written", pod=f"{pod.namespace}/{pod.name}", problem=str(error))
                    self._keep_refused(pod, annotations)
                else:
                    self._put_back(pod, annotations)
                    await anyio.sleep(backoff.next())
            else:
                backoff.reset()
                denied.reset()
                if lacking:
                    log.info("choices_written_again")
                lacking = False

    async def _lacks_right(self, pod: Regarding) -> bool:
        """Whether the 403 is due to the agent's account rather than to the pod.

        A webhook that refuses every pod of a burst costs one question.
        """
        if anyio.current_time() < self._granted_until:
            return False
        if await lacks_right(self._api, "patch", "pods", pod.namespace):
            return True
        self._granted_until = anyio.current_time() + DENIED_SECONDS
        return False

    def _put_back(self, pod: Regarding, annotations: dict[str, str]) -> None:
        """Have them written later, together with what has come for the pod meanwhile."""
        _, newer = self._waiting.pop(pod.uid, (pod, {}))
        self._add(pod, {**annotations, **newer})

    def _keep_refused(self, pod: Regarding, annotations: dict[str, str]) -> None:
        if pod.uid in self._waiting:  # the next container's have come meanwhile
            _, newer = self._waiting[pod.uid]
            self._waiting[pod.uid] = (pod, {**annotations, **newer})
            return
        if len(self._refused) == WAITING_PATCHES:
            del self._refused[next(iter(self._refused))]
        self._refused[pod.uid] = annotations
