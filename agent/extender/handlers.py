"""The HTTP face: filter, prioritize, preempt, bind, simulate, answered from the ledger, and who may ask."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import structlog
from anyio import get_cancelled_exc_class

from agent.extender import scheduler_protocol
from agent.extender.binder import Binder, NotBound, PodRequest
from agent.extender.eviction import victims_needed
from agent.extender.gangs import NotRecorded
from agent.extender.metrics import ExtenderMetrics
from agent.extender.objects import WatchedPod, gang_of
from agent.extender.pod_demand import PodDemand
from agent.extender.simulation import simulated
from agent.extender.verdicts import NOT_REACHED, Verdicts
from agent.model.pod import Impossible
from agent.web.server import Handler, HttpRequest, HttpServer, Reply

log = structlog.get_logger()

JSON = {"Content-Type": "application/json"}
FOLDER = "/scheduler"
SIMULATE = "simulate"
LARGE = 1 << 20  # bytes above which a request is decoded off the loop
# kube-scheduler tries a refused pod again when a pod ends, by a watch of its own, and may ask before the
# ledger has heard of that end. Refused once more, the pod would wait for the next event, or five minutes
# (podMaxInUnschedulablePodsDuration). So a refusal is looked at again after a moment. It takes half of the
# looks that are left, the first one half a second, since the next event may be far where little happens; in
# the long run one comes each second: the scheduler works on one pod at a time, and loses a tenth of its time.
LAG_SECONDS = 0.1
MOST_LOOKS = 10.0
REMEMBERED_NAMES = 100  # of refused callers: a holder of the signing key could make up any number


@dataclass(frozen=True, slots=True)
class ServingState:
    """The state that a leader answers from; a new one with each lease."""

    verdicts: Verdicts
    binder: Binder
    # Why the list of unbound pods, of which gangs are known, is not the newest; empty: it is.
    unbound_problem: Callable[[], str] = str


class Unready(Exception):
    """Nothing is known to answer from now, for the reason in the text; kube-scheduler asks again."""


# The answer in JSON, and the result as metrics show it. Raises Unready, BadRequest.
Act = Callable[[HttpRequest, ServingState], Awaitable[tuple[bytes, str]]]


class Verbs:
    """Routes that answer 503 unless `serving` gives something to answer from."""

    def __init__(self, serving: Callable[[], ServingState | None], metrics: ExtenderMetrics) -> None:
        self._serving = serving
        self._metrics = metrics
        self._looks = MOST_LOOKS  # left at `_counted`; one more comes with each second
        self._counted = -math.inf

    def add_to(self, server: HttpServer, most_bytes: int) -> None:
        """Take the paths that gpu-admission's users know, and three more."""
        for path, act in (
            ("predicates", self.filter),
            ("priorities", self.prioritize),
            ("preempt", self.preempt),
            ("bind", self.bind),
            (SIMULATE, self.simulate),
        ):
            server.add_post(f"{FOLDER}/{path}", self._measured(path, act), most_bytes)

    async def filter(self, request: HttpRequest, serving: ServingState) -> tuple[bytes, str]:
        asked = await _asked(request)
        try:
            wanted = serving.binder.request(asked.pod)
        except Impossible as error:
            refused = dict.fromkeys(asked.names, str(error))
            return scheduler_protocol.filtered(asked, [], refused, unresolvable=True), "impossible"
        if wanted.demand.nothing:
            return scheduler_protocol.filtered(asked, list(asked.names), {}), "ok"
        gang = ""
        if gang_of(asked.pod):
            gang = await serving.binder.gangs.gang(asked.pod.metadata.uid, wanted.demand)
            if not gang and (problem := serving.unbound_problem()):
                # Without GPUs of its own a gang might be bound by halves; kube-scheduler asks again.
                raise Unready(f"nothing is known of the pod's gang: {problem}")
        uid, former = asked.pod.metadata.uid, ""
        if gang and (serving.binder.gangs.node(uid) or "") in asked.names:
            # On that node its own are free for it. Elsewhere they stay its own until it gets others: a caller
            # who names other nodes, or none, takes nothing from it.
            former = serving.binder.gangs.node(uid) or ""
            serving.binder.gangs.release(uid)
        fitting, refused = await self._judged(serving, wanted.demand, asked.names)
        if gang:
            if not fitting and asked.names:
                serving.binder.gangs.refuse(gang)
            fitting, refused = await _kept_for_gang(
                serving, asked.pod, gang, wanted, fitting, refused, former
            )
            try:
                await serving.binder.record()
            except NotRecorded as error:
                # Bound by a next leader that knows nothing of it, its gang might be left half bound.
                raise Unready(f"what is kept for the pod's gang could not be recorded: {error}") from error
        return scheduler_protocol.filtered(asked, fitting, refused), "ok" if fitting else "nowhere"

    async def _judged(
        self, serving: ServingState, demand: PodDemand, names: Sequence[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Nodes that fit, and why others do not; a refusal is looked at again. Raises Unready."""
        fitting, refused = await serving.verdicts.judge(demand, names)
        patience = math.ceil(self._looks_left() / 2) if names else 0
        # Where nodes were not reached the next attempt goes on: a second look would double the work of this.
        while not fitting and NOT_REACHED not in refused.values() and patience and self._looks_left() >= 1:
            patience, self._looks = patience - 1, self._looks - 1
            await anyio.sleep(LAG_SECONDS)
            if self._serving() is not serving:
                # A refusal, by a ledger that hears nothing any more, would keep the pod from the next leader.
                raise Unready("this extender leads no more, or its ledger is not complete now; try again")
            fitting, refused = await serving.verdicts.judge(demand, names)
        return fitting, refused

    def _looks_left(self) -> float:
        now = anyio.current_time()
        self._looks = min(MOST_LOOKS, self._looks + now - self._counted)
        self._counted = now
        return self._looks

    async def prioritize(self, request: HttpRequest, serving: ServingState) -> tuple[bytes, str]:
        asked = await _asked(request)
        try:
            wanted = serving.binder.request(asked.pod)
        except Impossible:
            return scheduler_protocol.prioritized(asked.names, [0] * len(asked.names)), "impossible"
        if wanted.owner and not wanted.demand.nothing:  # else no binding of a replica is ever known
            await serving.binder.siblings_known(wanted.owner, asked.pod.metadata.uid)
        scores = await serving.verdicts.rank(wanted.demand, wanted.policy, asked.names, wanted.owner)
        return scheduler_protocol.prioritized(asked.names, scores), "ok"

    async def preempt(self, request: HttpRequest, serving: ServingState) -> tuple[bytes, str]:
        """Nodes where evictions would give the pod its GPUs, and which of them are needed."""
        asked = scheduler_protocol.preemption(request.body)
        try:
            demand = serving.binder.request(asked.pod).demand
        except Impossible:
            return scheduler_protocol.preempted(asked, {}), "impossible"
        if demand.nothing:
            return scheduler_protocol.preempted(asked, asked.victims), "ok"
        fleet = serving.verdicts.fleet
        found = await victims_needed(fleet, demand, asked.victims, give_back=asked.only_gpus)
        return scheduler_protocol.preempted(asked, found), "ok" if found else "nowhere"

    async def bind(self, request: HttpRequest, serving: ServingState) -> tuple[bytes, str]:
        binding = scheduler_protocol.binding(request.body)
        try:
            await serving.binder.bind(binding)
        except NotBound as error:
            log.warning("pod_not_bound", pod=binding.pod, node=binding.node, problem=str(error))
            return scheduler_protocol.bound(str(error)), "refused"
        return scheduler_protocol.bound(), "ok"

    async def simulate(self, request: HttpRequest, serving: ServingState) -> tuple[bytes, str]:
        """As filter answers, for callers that will not bind."""
        asked = await _asked(request)
        try:
            demand = serving.binder.request(asked.pod).demand
        except Impossible as error:
            refused = dict.fromkeys(asked.names, str(error))
            return scheduler_protocol.filtered(asked, [], refused, unresolvable=True), "impossible"
        if demand.nothing:
            return scheduler_protocol.filtered(asked, list(asked.names), {}), "ok"
        fitting, refused = await simulated(serving.verdicts, demand, asked)
        return scheduler_protocol.filtered(asked, fitting, refused), "ok" if fitting else "nowhere"

    def _measured(self, verb: str, act: Act) -> Handler:
        async def handle(request: HttpRequest) -> Reply:
            started = time.perf_counter()
            # What is counted where no answer is made: too late, or a fault, which the server answers.
            code, result = 500, "error"
            try:
                reply, result = await self._answer(request, act)
                code = reply.status
                return reply
            except get_cancelled_exc_class():
                code, result = 503, "late"
                raise
            finally:
                self._metrics.requests.labels(verb, result).inc()
                self._metrics.responses.labels(verb, str(code)).inc()
                self._metrics.seconds.labels(verb).observe(time.perf_counter() - started)

        return handle

    async def _answer(self, request: HttpRequest, act: Act) -> tuple[Reply, str]:
        try:
            if (serving := self._serving()) is None:
                raise Unready("this extender is not the leader, or its ledger is not complete yet; try again")
            body, result = await act(request, serving)
            return Reply(body, headers=JSON), result
        except Unready as error:
            return Reply.text(str(error), 503), "unready"
        except scheduler_protocol.BadRequest as error:
            return Reply.text(str(error), 400), "malformed"


async def _kept_for_gang(
    serving: ServingState,
    pod: WatchedPod,
    gang: str,
    wanted: PodRequest,
    fitting: list[str],
    refused: dict[str, str],
    former: str,
) -> tuple[list[str], dict[str, str]]:
    """The best of the nodes alone, or the `former`, where the pod's GPUs are kept for it; see `gangs`."""
    gangs, uid = serving.binder.gangs, pod.metadata.uid
    scores = await serving.verdicts.rank(wanted.demand, wanted.policy, fitting)
    for _, node in sorted(zip(scores, fitting, strict=True), key=lambda each: (each[1] != former, -each[0])):
        claim = serving.binder.choose(node, wanted, f"{pod.metadata.namespace}/{pod.metadata.name}")
        if claim is not None:
            gangs.release(uid)
            if serving.verdicts.fleet.where(uid) is None:
                gangs.keep(uid, gang, node, claim)
            others = dict.fromkeys(fitting, f"the pod's GPUs are kept on {node}, as its gang's are on others")
            return [node], {**refused, **{name: why for name, why in others.items() if name != node}}
    return fitting, refused


async def _asked(request: HttpRequest) -> scheduler_protocol.Asked:
    if len(request.body) < LARGE:
        return scheduler_protocol.asked(request.body)
    return await anyio.to_thread.run_sync(scheduler_protocol.asked, request.body)


class AllowedNames:
    """Common names of the clients that are served; the API server takes them for the user's name, too.

    The authority alone is not enough: kubeadm's has signed a certificate of every kubelet, too.
    """

    def __init__(self, names: Sequence[str], simulating: Sequence[str] = ()) -> None:
        """`simulating`: those that may ask what would fit, and nothing else."""
        self._names = frozenset(names)
        self._simulating = frozenset(simulating)
        self._logged: set[str] = set()

    def refusal(self, certificate: Mapping[str, Any], path: str) -> str | None:
        """Why the caller with this certificate (as `ssl.SSLSocket.getpeercert` gives it) is not served."""
        names = [
            value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
        ]
        asks = path == f"{FOLDER}/{SIMULATE}"
        served = self._names | self._simulating if asks else self._names
        if len(names) == 1 and names[0] in served:
            return None
        shown = ", ".join(map(repr, names)) or "no common name"
        if shown not in self._logged and len(self._logged) < REMEMBERED_NAMES:
            self._logged.add(shown)
            log.warning("client_certificate_refused", name=shown, allowed=sorted(served))
        key = "tls.clientNames and tls.simulateNames have" if asks else "tls.clientNames has"
        return f"a certificate of {shown} is not served here; {key} {', '.join(sorted(served))}"
