"""The agent's side of a clean-up that is asked for: it looks first, leaves service, and keeps the node clean.

Its process goes on: helm deletes it a moment later, or nobody does, and then it serves again.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.cleanup import request as exchange
from agent.cleanup import this_node as node_files
from agent.cleanup.request import (
    CleanupFailed,
    CleanupRefused,
    CleanupReport,
    CleanupRequest,
    CleanupState,
    Exchange,
)
from agent.cluster.api import ApiError, KubeApi, connect
from agent.cluster.lean import NoClusterAccess
from agent.cluster.node import OwnNode
from agent.cluster.pods import PodCache
from agent.kit.tasks import Supervisor
from agent.nvml.port import NvmlPort
from agent.settings import Settings
from agent.web.probes import Probes
from agent.web.server import HttpServer

log = structlog.get_logger()

RETRY_SECONDS = 5.0
LOCK_SECONDS = 5.0  # the agent that served was this process: nobody else should hold it
SYNC_SECONDS = 5.0
# The hook takes its annotations away when all nodes are clean, and helm then deletes the agents, which takes
# a minute or more in a cluster of a thousand nodes.
DELETION_SECONDS = 600.0


def utc_now() -> datetime:
    """The wall clock: a request names its end by it."""
    return datetime.now(UTC)


async def answer(node: OwnNode, request: CleanupRequest, state: CleanupState, message: str = "") -> None:
    """Answer the request, unless the node shows this answer already. Raises ApiError."""
    report = CleanupReport(request.id, state, message)
    answer = exchange.answering(report)
    if node.annotations().get(exchange.REPORT) != answer[exchange.REPORT]:
        await node.write_metadata({}, answer)


class Requests:
    """Follows the request on the own node."""

    def __init__(
        self, settings: Settings, node: OwnNode, pods: PodCache, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """`node` and `pods` must be followed by somebody."""
        self._settings = settings
        self._node = node
        self._pods = pods
        self._clock = clock

    async def accepted(self) -> CleanupRequest:
        """Wait for a request that no pod prevents. Others are answered, old ones removed."""
        refused = ""
        while True:
            seen = self._node.reflector.items.version
            found = Exchange.of(self._node.annotations())
            request = found.request
            failed = False
            try:
                if request and request.seconds_left(self._clock()) > 0:
                    if request.id != refused:
                        outcome = await self._look(request)
                        if outcome is None:
                            return request
                        refused, failed = request.id, outcome is CleanupState.FAILED
                elif found.present:
                    await self._node.write_metadata({}, exchange.NOTHING)
            except ApiError as error:
                log.warning("cleanup_not_answered", problem=str(error))
                failed = True
            if failed:
                refused = ""
                await anyio.sleep(RETRY_SECONDS)  # our own answer is a change, too
            else:
                await self._node.reflector.items.wait_change(seen)

    async def _look(self, request: CleanupRequest) -> CleanupState | None:
        """None: nothing stands in the way, and nothing was answered. Raises ApiError."""
        try:
            await node_files.refuse_holders(self._settings, self._pods)
        except CleanupFailed as error:
            log.warning("cleanup_refused", request=request.id, state=error.state.value, problem=str(error))
            await answer(self._node, request, error.state, str(error))
            return error.state
        log.info("cleanup_accepted", request=request.id, until=request.until.isoformat())
        return None


async def stand_by(
    settings: Settings, nvml: NvmlPort, name: str, request: CleanupRequest, stop: anyio.Event
) -> None:
    """Clean the node `name` up, answer, and return when the agent is to serve again, or at `stop`.

    The probes are answered meanwhile: alive, and not ready.
    """
    try:
        api = await connect(Path(settings.cluster.kubeconfig) if settings.cluster.kubeconfig else None)
    except NoClusterAccess as error:
        log.error("cleanup_abandoned", problem=str(error))
        return
    supervisor = Supervisor()
    http = HttpServer(settings.http.address, settings.http.port)
    Probes(supervisor, lambda: [_status_line(request)]).add_to(http)
    own = OwnNode(api, name)
    pods = PodCache(api, name, lambda: own.uid)
    async with api, anyio.create_task_group() as group:

        async def stopped() -> None:
            await stop.wait()
            group.cancel_scope.cancel()

        group.start_soon(stopped)
        await group.start(http.serve)
        group.start_soon(supervisor.restarting, "node watch", own.reflector.run)
        group.start_soon(supervisor.restarting, "pod watch", pods.reflector.run)
        await Standby(settings, nvml, api, own, pods).until_over(request)
        group.cancel_scope.cancel()
    if not stop.is_set():
        log.info("back_in_service")


def _status_line(request: CleanupRequest) -> str:
    return (
        f"this node was cleaned up for an uninstall (annotation {exchange.REQUEST}); the agent serves again "
        f"when that is called off, or at {request.until.isoformat()}"
    )


class Standby:
    """One node while it is kept clean."""

    def __init__(
        self,
        settings: Settings,
        nvml: NvmlPort,
        api: KubeApi,
        node: OwnNode,
        pods: PodCache,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """`node` and `pods` must be followed by somebody."""
        self._settings = settings
        self._pods = pods
        self._nvml = nvml
        self._api = api
        self._node = node
        self._clock = clock

    async def until_over(self, request: CleanupRequest) -> None:
        """Clean up and stay until no request is in force, or a pod prevents it after all."""
        with anyio.move_on_after(SYNC_SECONDS):
            await self._node.reflector.items.wait_for(bool)
        current: CleanupRequest | None = request
        try:
            async with node_files.without_agent(self._settings, LOCK_SECONDS):
                while current is not None:
                    with anyio.move_on_after(current.seconds_left(self._clock())) as scope:
                        current = await self._kept_clean(current, scope)
                    if scope.cancelled_caught:
                        log.warning("cleanup_expired", request=current.id if current else "")
                        return
        except CleanupFailed as error:
            log.warning("cleanup_refused", request=request.id, problem=str(error))
            await self._answer(request, error)

    async def _kept_clean(self, request: CleanupRequest, scope: anyio.CancelScope) -> CleanupRequest | None:
        """Until the request is taken back (None) or followed by another. Raises CleanupRefused."""
        while True:
            try:
                await self._clean()
                await answer(self._node, request, CleanupState.CLEAN)
            except CleanupRefused:
                raise
            except (CleanupFailed, ApiError, OSError) as error:
                log.warning("cleanup_failed", request=request.id, problem=str(error))
                await self._answer(request, error)
                with anyio.move_on_after(RETRY_SECONDS):
                    return await self._next(request, scope)
            else:
                log.info("node_cleaned", request=request.id)
                return await self._next(request, scope)

    async def _clean(self) -> None:
        users = await node_files.refuse_holders(self._settings, self._pods)
        await node_files.leave_modes(self._settings, self._nvml)
        await anyio.to_thread.run_sync(node_files.remove_files, self._settings, users)
        await node_files.forget_node(self._api, self._node.name, keep=exchange.NOTHING.keys())

    async def _answer(self, request: CleanupRequest, error: Exception) -> None:
        state = error.state if isinstance(error, CleanupFailed) else CleanupState.FAILED
        try:
            await answer(self._node, request, state, str(error))
        except ApiError as problem:
            log.warning("cleanup_not_answered", problem=str(problem))

    async def _next(self, request: CleanupRequest, scope: anyio.CancelScope) -> CleanupRequest | None:
        """The request after this one, once there is one."""
        removed = False
        async for items in self._node.reflector.items.values():
            for node in items.values():
                found = Exchange.of(node.metadata.annotations).request
                if found is None and not removed:
                    removed = True
                    log.info("waiting_for_deletion", seconds=DELETION_SECONDS)
                    scope.deadline = anyio.current_time() + DELETION_SECONDS
                elif found is not None and found.seconds_left(self._clock()) <= 0:
                    return None
                elif found is not None and found.id != request.id:
                    return found
        raise AssertionError("a cell's values never end")
