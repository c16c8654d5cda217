"""The agent's side of a clean-up that is asked for, while it serves: look first, then leave service."""

from collections.abc import Callable
from datetime import UTC, datetime

import anyio
import structlog

from agent.cleanup import request as exchange
from agent.cleanup.request import CleanupFailed, CleanupReport, CleanupRequest, CleanupState, Exchange
from agent.cleanup.this_node import refuse_holders
from agent.cluster.api import ApiError
from agent.cluster.node import NodeObject
from agent.cluster.pods import PodCache
from agent.settings import Settings

log = structlog.get_logger()

RETRY_SECONDS = 5.0


def utc_now() -> datetime:
    """The wall clock: a request names its end by it."""
    return datetime.now(UTC)


async def answer(node: NodeObject, request: CleanupRequest, state: CleanupState, message: str = "") -> None:
    """Answer the request, unless the node shows this answer already. Raises ApiError."""
    report = CleanupReport(request.id, state, message)
    answer = exchange.answering(report)
    if node.value is None or node.value.metadata.annotations.get(exchange.REPORT) != answer[exchange.REPORT]:
        await node.patch_metadata(annotations=answer)


class Requests:
    """Follows the request on the own node."""

    def __init__(
        self, settings: Settings, node: NodeObject, pods: PodCache, clock: Callable[[], datetime] = utc_now
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
            found = Exchange.of(self._node.value.metadata.annotations if self._node.value else {})
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
                    await self._node.patch_metadata(annotations=exchange.NOTHING)
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
            await refuse_holders(self._settings, self._pods)
        except CleanupFailed as error:
            log.warning("cleanup_refused", request=request.id, state=error.state.value, problem=str(error))
            await answer(self._node, request, error.state, str(error))
            return error.state
        log.info("cleanup_accepted", request=request.id, until=request.until.isoformat())
        return None
