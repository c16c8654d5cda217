"""Two replicas of the scheduler extender, and the way on which kube-scheduler reaches them.

Requests go straight to a replica's routes, in its own life: HTTP between scheduler and extender has tests of
its own (`tests/component/extender`).
"""

import asyncio
import contextvars
import json
import random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from agent.extender.app import Extender, running
from agent.extender.handlers import FOLDER
from agent.extender.pod_demand import RESOURCES
from agent.extender.settings import ExtenderSettings, Lease, PlainHttp
from agent.simulator.kubelet.api_server import Pod
from agent.simulator.kubelet.http_api import HttpApi
from agent.web.server import HANDLER_SECONDS, HttpRequest, Reply
from tests.storm import seams
from tests.storm.lives import Process
from tests.storm.ordering import InOrder

REPLICAS = 2
TIMEOUT_SECONDS = 5.0  # kube-scheduler's DefaultExtenderTimeout (pkg/scheduler/extender.go)
BACKOFF_SECONDS = (1.0, 10.0)  # its podInitialBackoffSeconds and podMaxBackoffSeconds
# As `config/scheduler` has them: instances and claims are not among them.
MANAGED = frozenset(RESOURCES)
WRONG_REPLICA = 0.1  # how often a request reaches the replica that does not serve: endpoints are late


class Unreachable(Exception):
    """A request to the extender has no answer."""


class Replica(Process):
    """One life of one replica."""

    def __init__(self, number: int, socket: str, name: str) -> None:
        super().__init__(number)
        self.extender: Extender | None = None
        self._socket = socket
        self._settings = ExtenderSettings(
            http=PlainHttp(address="127.0.0.1", port=0, verbs=True),
            lease=Lease(namespace="ns", identity=f"{name}-{number}"),
        )
        self._context = contextvars.copy_context()
        self._requests = InOrder()

    async def serve(self) -> None:
        """The process, until it is to stop."""
        self._context = contextvars.copy_context()
        api = seams.client(self._socket, "extender")
        try:
            async with running(self._settings, api) as self.extender:
                await self.stop.wait()
        finally:
            for each in tuple(self._requests):
                each.cancel()

    @property
    def serves(self) -> bool:
        """Whether the Service is to send requests here."""
        return self.extender is not None and not self.extender.blockers()

    async def ask(self, path: str, body: bytes) -> Reply:
        """The answer of one of its routes. Raises Unreachable."""
        extender = self.extender
        if extender is None or self.ended.is_set():
            raise Unreachable("connection refused")
        handler = extender.http._routes[f"{FOLDER}/{path}"]

        async def answer() -> Reply:
            with anyio.fail_after(HANDLER_SECONDS):
                return await handler(HttpRequest(f"{FOLDER}/{path}", body=body))

        task = asyncio.get_running_loop().create_task(answer(), context=self._context)
        self._requests.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise Unreachable("the connection was cut")
            return task.result()
        except (TimeoutError, seams.Dead) as error:
            raise Unreachable(str(error) or "no answer in time") from error
        finally:
            task.cancel()
            self._requests.discard(task)


class Replicas:
    """Both replicas, as kube-scheduler's `extenders` has them: one address. See `scheduler.Extender`."""

    def __init__(self, group: TaskGroup, http: HttpApi, node: str, socket: str, seed: int) -> None:
        self.away = False  # nobody can be reached
        self.delay = 0.0  # seconds that a request takes, and its answer
        self.lives: list[Replica | None] = [None] * REPLICAS
        self.disturbed = 0.0  # when no answer came last
        self.killed = 0
        self._group = group
        self._http = http
        self._node = node
        self._socket = socket
        self._rng = random.Random(f"extenders of {seed}")
        self._started = 0
        self._retries = 0

    def start(self, number: int) -> None:
        """Start a replica, unless it runs."""
        former = self.lives[number]
        if former is None or former.ended.is_set():
            self._started += 1
            replica = self.lives[number] = Replica(self._started, self._socket, f"replica-{number}")
            self.disturbed = anyio.current_time()
            # A context of its own: whose calls these are is found by a context variable.
            contextvars.copy_context().run(self._group.start_soon, replica.run)

    async def stop(self, number: int, *, kill: bool) -> None:
        """SIGKILL or SIGTERM."""
        self.disturbed = anyio.current_time()
        if (replica := self.lives[number]) is not None and not replica.ended.is_set():
            self.killed += kill
            await (replica.kill() if kill else replica.terminate())

    async def close(self) -> int:
        """End all; how many had been killed."""
        for number in range(REPLICAS):
            await self.stop(number, kill=False)
        return self.killed

    async def calm(self) -> None:
        """All is well again."""
        self.away, self.delay = False, 0.0
        for number in range(REPLICAS):
            self.start(number)

    def problem(self) -> str | None:
        """Broken invariants, in words."""
        for each in self.lives:
            if each is not None and each.overdue:  # it was killed then
                return "an extender did not end in time after SIGTERM"
            if each is None or each.life.dead:
                continue
            if each.failure is not None:
                return f"an extender ended by itself: {each.failure!r}"
            for state in each.extender.supervisor.states.values() if each.extender else ():
                if state.restarts:
                    return f"the extender's task {state.name} failed: {state.last_error}"
        if sum(each is not None and each.serves for each in self.lives) > 1:
            return "two extenders serve at once"
        return None

    # What the scheduler asks

    async def refuses(self, pod: Pod) -> str:
        """Filter."""
        if not _is_managed(pod):
            return ""
        body = {"Pod": self._http.pod_object(pod), "Nodes": None, "NodeNames": [self._node]}
        try:
            answer = await self._post("predicates", body)
        except Unreachable as error:
            self._try_again_later()
            return f"the extender cannot be asked: {error}"
        why = {**answer["FailedNodes"], **answer["FailedAndUnresolvableNodes"]}
        return "" if self._node in answer["NodeNames"] else str(why.get(self._node, "it says nothing"))

    async def bind(self, pod: Pod) -> None:
        """Bind."""
        spec = pod.spec
        if not _is_managed(pod):
            self._http._api.bind(pod)  # kube-scheduler does it itself
            return
        body = {
            "PodName": spec.name,
            "PodNamespace": spec.namespace,
            "PodUID": pod.api_uid,
            "Node": self._node,
        }
        try:
            problem = (await self._post("bind", body))["Error"]
        except Unreachable as error:
            problem = str(error)
        if problem:
            self._try_again_later()

    async def _post(self, path: str, body: object) -> Any:
        alive = [each for each in self.lives if each is not None and not each.ended.is_set()]
        serving = [each for each in alive if each.serves]
        wrong = self._rng.random() < WRONG_REPLICA
        known = alive if wrong or not serving else serving
        if self.away or not known:
            raise Unreachable("connection refused")
        try:
            with anyio.fail_after(TIMEOUT_SECONDS):
                await anyio.sleep(self.delay)
                reply = await self._rng.choice(known).ask(path, json.dumps(body).encode())
                await anyio.sleep(self.delay)
            if reply.status != 200:
                raise Unreachable(f"{reply.status} {reply.body.decode()}")
            return json.loads(reply.body)
        except TimeoutError as error:
            raise Unreachable("no answer in time") from error

    def _try_again_later(self) -> None:
        """A pod that the scheduler has failed to place comes back after its back-off."""
        if self._retries:
            return

        async def wait() -> None:
            await anyio.sleep(self._rng.uniform(*BACKOFF_SECONDS))
            self._retries -= 1
            self._http._api.changed()

        self._retries += 1
        self._group.start_soon(wait)


def _is_managed(pod: Pod) -> bool:
    """Whether kube-scheduler asks about a pod at all (its `IsInterested`): by `managedResources`."""
    return not MANAGED.isdisjoint(pod.spec.resources)
