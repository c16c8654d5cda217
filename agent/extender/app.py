"""The extender's composition root: HTTP from the first moment on, a ledger only while it leads."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
from anyio.abc import TaskStatus

from agent import __version__
from agent.cluster.api import KubeApi, connect
from agent.cluster.event_recorder import EventRecorder
from agent.cluster.lean import NoClusterAccess
from agent.extender.binder import Binder
from agent.extender.fleet import Fleet
from agent.extender.gangs import GangRecord
from agent.extender.handlers import AllowedNames, ServingState, Verbs
from agent.extender.lease import NAMESPACE_FILE, Election, ServingLabel
from agent.extender.ledger_sync import LedgerSync
from agent.extender.metrics import ExtenderMetrics, LedgerFigures
from agent.extender.pending_pods import PendingPods
from agent.extender.settings import ExtenderSettings
from agent.extender.verdicts import Verdicts
from agent.kit.tasks import Cell, FatalError, Supervisor
from agent.model.placement import Mix, PlacementPolicy
from agent.web.certificates import Certificates, Files
from agent.web.connections import ConnectionLimits
from agent.web.probes import Probes
from agent.web.server import HttpRequest, HttpServer, Reply

log = structlog.get_logger()

MEBIBYTE = 1 << 20
REPORTER = "gpu-node-agent-extender"  # of events
NODES_AT_ONCE = 256  # looked at for one scrape without a break: about 5 ms
# All calls may come from one address, the API server's or kube-scheduler's, with a connection for each
# binding under way. A connection with TLS takes 0.3 MiB.
PLAIN_LIMITS = ConnectionLimits(
    connections=1024, connections_per_address=768, requests=512, requests_per_address=384
)
TLS_LIMITS = ConnectionLimits(
    connections=256, connections_per_address=192, requests=128, requests_per_address=96
)


Keep = Callable[[Cell[bool]], Coroutine[object, object, None]]


class Extender:
    def __init__(
        self, settings: ExtenderSettings, api: KubeApi, namespace: str, keep: Keep | None = None
    ) -> None:
        """`keep` runs beside each ledger, with its `complete`, until the ledger is dropped."""
        self._keep = keep
        self._settings = settings
        self._api = api
        self._namespace = namespace
        self.supervisor = Supervisor()
        self.metrics = ExtenderMetrics()
        self.http = HttpServer(settings.http.address, settings.http.port, limits=PLAIN_LIMITS)
        self.https: HttpServer | None = None
        self.certificates: Certificates | None = None
        self.election = Election(api, settings.lease, namespace)
        pod = settings.serving.pod
        self._label = (
            ServingLabel(api, settings.serving, pod, namespace, lambda: self.election.holds) if pod else None
        )
        self.sync: LedgerSync | None = None
        self._serving: ServingState | None = None
        self.stopping = False

    @property
    def fleet(self) -> Fleet | None:
        """The ledger; None: not leader."""
        return self.sync.fleet if self.sync else None

    @property
    def serving(self) -> ServingState | None:
        """The source of answers; None: not leader, or not complete."""
        ready = self.sync is not None and self.sync.complete.value and self.election.holds
        return self._serving if ready else None

    def blockers(self) -> list[str]:
        """Why it serves nothing now, each in a sentence; empty: it serves."""
        if self.stopping:
            return ["the extender is stopping"]
        if not self.election.holds:
            problem = f" ({self.election.problem})" if self.election.problem else ""
            return [f"another replica leads: {self.election.holder or 'not known yet'}{problem}"]
        if not self.serving:
            return [self.sync.waits_for if self.sync else "it has just become leader"]
        unfound = self._label.problem if self._label else ""
        return [f"the Service does not find it, its label cannot be written: {unfound}"] if unfound else []

    def shortcomings(self) -> list[str]:
        """Why it could not take over; empty: it is ready, whether it leads or not."""
        stalled = self.election.stalled()
        return ["the extender is stopping"] if self.stopping else [stalled] if stalled else []

    async def follow(self) -> None:
        """Build a ledger with each lease and drop it with its end, until cancelled."""
        leading = self.election.leading
        while True:
            await leading.wait_for(bool)
            async with anyio.create_task_group() as group:
                group.start_soon(self._lead)
                await leading.wait_for(lambda held: not held)
                group.cancel_scope.cancel()

    async def _lead(self) -> None:
        settings = self._settings
        fleet = Fleet(Mix({int(size): weight for size, weight in settings.mix.items()}))
        policy = PlacementPolicy(settings.placement)
        gangs = f"{settings.lease.name}-gangs"
        try:
            # In lists and record from here on stands all that a former leader wrote: its last write is over.
            record = GangRecord(self._api, self._namespace, gangs, lambda: self.election.holds)
            binder = Binder(
                self._api,
                fleet,
                policy,
                settings.assume_seconds,
                lambda: self.election.holds,
                settings.gang_seconds,
                record,
                spread_replicas=settings.spread_replicas,
            )
            self.sync = sync = LedgerSync(
                self._api,
                fleet,
                self.supervisor,
                self.metrics.expired.inc,
                lambda: record.problem or binder.gangs.problem,
            )
            verdicts = Verdicts(fleet)
            events = EventRecorder(self._api, self.election.identity, REPORTER)
            pending = PendingPods(
                self._api, fleet, verdicts, events, self.supervisor, lambda: sync.complete.value, binder.gangs
            )
            self._serving = ServingState(verdicts, binder, lambda: pending.problem)
            async with anyio.create_task_group() as group:
                if self._keep:
                    group.start_soon(self._keep, sync.complete)
                group.start_soon(_log_completeness, sync)
                if self._label:
                    group.start_soon(self._label.keep, sync.complete)
                group.start_soon(_follow_pending, record, binder, pending)
                await sync.run()
        finally:
            self.sync = self._serving = None

    def add_routes(self) -> None:
        """Probes and metrics, and the verbs where they are wanted."""
        Probes(self.supervisor, self.shortcomings, self.blockers).add_to(self.http)
        self.http.add_probe("/serving", self._serving_page)
        self.http.add_route("/metrics", self._metrics_page)
        verbs = Verbs(lambda: self.serving, self.metrics)
        most = self._settings.http.most_mebibytes * MEBIBYTE
        if self._settings.http.verbs:
            verbs.add_to(self.http, most)
        if self.https:
            verbs.add_to(self.https, most)

    async def _serving_page(self, _: HttpRequest) -> Reply:
        blockers = self.blockers()
        return Reply.text("\n".join(blockers) or "serving", 503 if blockers else 200)

    async def _metrics_page(self, _: HttpRequest) -> Reply:
        self.metrics.leader.set(self.election.holds)
        self.metrics.ready.set(not self.blockers())
        figures = await _ledger_figures(self.sync) if self.sync and self.election.holds else None
        return await self.metrics.reply(figures)


async def _follow_pending(record: GangRecord, binder: Binder, pending: PendingPods) -> None:
    """Read the record of gangs, then follow unbound pods: the first list shows whose choices still count."""
    binder.gangs.take_over(await record.read())
    async with anyio.create_task_group() as group:
        group.start_soon(record.tidy, binder.gangs.kept)
        await pending.run()


async def _log_completeness(sync: LedgerSync) -> None:
    while True:
        await sync.complete.wait_for(bool)
        log.info("ledger_complete", nodes=len(sync.fleet.nodes), pods=sync.fleet.pods)
        await sync.complete.wait_for(lambda complete: not complete)
        log.warning("ledger_incomplete", problem=sync.waits_for)


async def _ledger_figures(sync: LedgerSync) -> LedgerFigures:
    fleet = sync.fleet
    names = list(fleet.nodes)
    held = there = 0
    for start in range(0, len(names), NODES_AT_ONCE):
        # Others run in between: after a start each node's free capacity is worked out for the first time.
        await anyio.lowlevel.checkpoint()
        some = fleet.allocated(names[start : start + NODES_AT_ONCE])
        held, there = held + some[0], there + some[1]
    return LedgerFigures(
        nodes=len(names),
        nodes_without_inventory=sum(
            bool(node.totals) and node.inventory is None for node in fleet.nodes.values()
        ),
        nodes_bad_inventory=sum(bool(node.problem) for node in fleet.nodes.values()),
        pods=fleet.pods,
        assumed_pods=fleet.waiting,
        sold_ratio=held / there if there else None,
        watch_age_seconds=sync.ages,
    )


@asynccontextmanager
async def running(
    settings: ExtenderSettings, connected: KubeApi | None = None, keep: Keep | None = None
) -> AsyncIterator[Extender]:
    """Serve while the context is open. Raises FatalError; a fatal task that fails leaves as a group.

    `connected`: a way to the API server; None: as configured. `keep`: see `Extender`.
    """
    if not settings.http.verbs and settings.tls.port is None:
        raise FatalError(
            "http.verbs is false and tls.port is null: kube-scheduler could not ask anything; set tls.port"
            " and a certificate, or http.verbs: true, which serves every caller that reaches the port"
        )
    api = connected or await _connect(settings)
    extender = Extender(settings, api, await anyio.to_thread.run_sync(_namespace, settings), keep)
    try:
        if settings.tls.port is not None:
            files = Files(settings.tls.certificate, settings.tls.key, settings.tls.client_authority)
            remedy = "mount a certificate, or set tls.port: null"
            extender.certificates = await anyio.to_thread.run_sync(Certificates, files, remedy)
            context = extender.certificates.context
            allowed = AllowedNames(settings.tls.client_names, settings.tls.simulate_names)
            extender.https = HttpServer(
                settings.http.address, settings.tls.port, context, TLS_LIMITS, allowed.refusal
            )
        extender.add_routes()
        log.info("extender_starting", version=__version__, identity=extender.election.identity)
        spawn = extender.supervisor.restarting
        async with anyio.create_task_group() as group:
            await group.start(_serve, extender, "http", extender.http)
            if extender.https:
                await group.start(_serve, extender, "https", extender.https)
            if extender.certificates:
                group.start_soon(spawn, "certificates", extender.certificates.follow)
            group.start_soon(spawn, "ledger", extender.follow)
            async with anyio.create_task_group() as electing:
                electing.start_soon(spawn, "lease", extender.election.run)
                try:
                    yield extender
                finally:
                    extender.stopping = True
                    electing.cancel_scope.cancel()
            group.cancel_scope.cancel()
    finally:
        await api.close()
    log.info("extender_stopped")


async def _serve(extender: Extender, name: str, server: HttpServer, *, task_status: TaskStatus[int]) -> None:
    await extender.supervisor.fatal(name, partial(server.serve, task_status=task_status))


async def _connect(settings: ExtenderSettings) -> KubeApi:
    try:
        return await connect(Path(settings.cluster.kubeconfig) if settings.cluster.kubeconfig else None)
    except NoClusterAccess as error:
        raise FatalError(f"the extender needs the Kubernetes API: {error}") from error


def _namespace(settings: ExtenderSettings) -> str:
    if settings.lease.namespace:
        return settings.lease.namespace
    try:
        return Path(NAMESPACE_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return "kube-system"
