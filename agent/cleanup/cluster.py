"""The uninstall hook: asks the agent of every node to clean up, waits for the answers, names obstacles.

The agents do the work and stay where they are. All that the hook changes is one annotation of each node,
with a time at which it ends: a hook that is killed leaves agents that go back into service by themselves.
"""

import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus

import anyio
import structlog

from agent.cleanup import request
from agent.cleanup.request import CleanupFailed, CleanupRefused, CleanupState, Exchange
from agent.cluster.api import ApiError, KubeApi, understood
from agent.cluster.reflector import PartialObject
from agent.model.pod import MPS, Pod

log = structlog.get_logger()

PAGE = 500
POLL_SECONDS = 1.0
# Nodes that join meanwhile have agents, too.
LIST_AGENTS_SECONDS = 5.0
CALLS_AT_ONCE = 16
# Longer than the hook itself waits: it takes a request back sooner than that ends.
MARGIN_SECONDS = 30.0
TAKE_BACK_SECONDS = 20.0
MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Release:
    namespace: str
    agents: str  # label selector of the agents' pods
    record: str = ""  # the Secret in which helm keeps the release; empty: leave it alone


@dataclass
class ClusterCleanup:
    api: KubeApi
    release: Release
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    # Of nodes that are not clean yet, by name; under no name the reason why the nodes are not known.
    problems: dict[str, str] = field(default_factory=dict)
    _id: str = field(default_factory=lambda: str(uuid.uuid4()))
    _asked: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _failure: CleanupFailed | None = None

    async def run(self, timeout_seconds: float) -> int:
        """Clean all nodes; how many.

        Raises CleanupFailed; then, and when it is cancelled, the agents go back into service.
        """
        await self._count_as_deployed()
        ends = anyio.current_time() + timeout_seconds + MARGIN_SECONDS
        try:
            await self._refuse_holders()
            with anyio.move_on_after(timeout_seconds):
                await self._all_clean(ends)
                await self._annotate_all(request.NOTHING)
                return len(self._done)
            raise CleanupFailed(self._late(timeout_seconds))
        except ApiError as error:
            await self._annotate_all(request.taking_back(self._id))
            raise CleanupFailed(str(error)) from error
        except BaseException:
            await self._annotate_all(request.taking_back(self._id))
            raise

    async def _count_as_deployed(self) -> None:
        """Let `helm upgrade` find the release if this hook fails.

        helm stores the status `uninstalling` before it makes a hook, and takes it back when none fails only
        (`pkg/action/uninstall.go`). It looks for the release to upgrade by the label `status` alone
        (`pkg/storage/storage.go`, Deployed), and sets that label again as soon as this hook has succeeded.
        """
        if not self.release.record:
            return
        path = f"/api/v1/namespaces/{self.release.namespace}/secrets/{self.release.record}"
        try:
            await self.api.merge_patch(path, {"metadata": {"labels": {"status": "deployed"}}})
        except ApiError as error:
            # helm may keep its releases elsewhere, or have dropped this revision.
            remedy = (
                "if this uninstall fails, run `helm rollback` with the newest revision before `helm upgrade`"
            )
            log.warning("release_not_marked", secret=self.release.record, problem=str(error), remedy=remedy)

    async def _refuse_holders(self) -> None:
        held = [
            f"{pod.metadata.namespace}/{pod.metadata.name} (node {pod.spec.node_name})"
            async for pod in self._pods("/api/v1/pods", {})
            if pod.asks_for({MPS.core, MPS.memory}) and pod.spec.node_name and not pod.finished
        ]
        if held:
            more = f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
            raise CleanupRefused(
                f"{len(held)} pod(s) hold MPS shares and would lose their daemon: "
                f"{', '.join(sorted(held)[:MOST_NAMED])}{more}; delete them, or wait until they have ended, "
                "and uninstall again. Nothing was changed"
            )

    async def _pods(self, path: str, selector: dict[str, str]) -> AsyncIterator[Pod]:
        async for page in self.api.pages(path, {"limit": str(PAGE), **selector}):
            for raw in page.items:
                yield understood(raw, Pod, path)

    async def _agents_nodes(self) -> set[str]:
        path = f"/api/v1/namespaces/{self.release.namespace}/pods"
        return {
            pod.spec.node_name
            async for pod in self._pods(path, {"labelSelector": self.release.agents})
            if pod.spec.node_name and not pod.finished
        }

    async def _all_clean(self, ends: float) -> None:
        """Return when the agents of all nodes have said so. Raises CleanupFailed, ApiError."""
        limiter = anyio.CapacityLimiter(CALLS_AT_ONCE)
        async with anyio.create_task_group() as group:

            async def follow(node: str) -> None:
                try:
                    await self._one(node, ends, limiter)
                except CleanupFailed as error:
                    self._failure = error
                    group.cancel_scope.cancel()

            started: set[str] = set()
            while True:
                try:
                    wanted = await self._agents_nodes()
                except ApiError as error:
                    if error.status == HTTPStatus.FORBIDDEN:
                        self._failure = CleanupFailed(str(error))
                        group.cancel_scope.cancel()
                    self.problems[""] = str(error)
                    await anyio.sleep(POLL_SECONDS)
                    continue
                self.problems.pop("", None)
                if wanted <= self._done:
                    break
                for node in sorted(wanted - started):
                    group.start_soon(follow, node)
                if started != started | wanted:
                    log.info("cleanup_requested", nodes=len(wanted - started), request=self._id)
                started |= wanted
                with anyio.move_on_after(LIST_AGENTS_SECONDS):
                    while not started <= self._done:
                        await anyio.sleep(POLL_SECONDS / 4)
        if self._failure:
            raise self._failure

    async def _one(self, node: str, ends: float, limiter: anyio.CapacityLimiter) -> None:
        """Ask a node's agent; return when it has answered that the node is clean, or the node is gone."""
        self.problems[node] = "its agent has not answered"
        asked = False
        while True:
            try:
                async with limiter:
                    if not asked:
                        self._asked.add(node)  # before the call: one that is cut short may have arrived
                        seconds = ends - anyio.current_time()
                        await self._annotate(node, request.asking(self._id, self.clock(), seconds))
                        asked = True
                    found = await self.api.read(_path(node), PartialObject)
            except ApiError as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    break
                if error.status == HTTPStatus.FORBIDDEN:
                    raise CleanupFailed(str(error)) from error
                self.problems[node] = str(error)
            else:
                if self._answered(node, Exchange.of(found.metadata.annotations)):
                    break
            await anyio.sleep(POLL_SECONDS)
        self.problems.pop(node, None)
        self._done.add(node)

    def _answered(self, node: str, exchange: Exchange) -> bool:
        """Whether the node is clean. Raises CleanupRefused."""
        if exchange.request is None or exchange.request.id != self._id:
            self.problems[node] = (
                "the request was taken away there; compare the node's clock with the others'"
            )
            return False
        report = exchange.report
        if report is None or report.id != self._id:
            return False
        if report.state is CleanupState.REFUSED:
            raise CleanupRefused(f"node {node}: {report.message}")
        if report.state is CleanupState.FAILED:
            self.problems[node] = report.message
        return report.state is CleanupState.CLEAN

    async def _annotate(self, node: str, annotations: Mapping[str, str | None]) -> None:
        await self.api.merge_patch(_path(node), {"metadata": {"annotations": dict(annotations)}})

    async def _annotate_all(self, annotations: Mapping[str, str | None]) -> None:
        """Annotate every node that was asked; where that fails the request ends by itself."""
        limiter = anyio.CapacityLimiter(CALLS_AT_ONCE)

        async def one(node: str) -> None:
            while True:
                try:
                    async with limiter:
                        await self._annotate(node, annotations)
                except ApiError as error:
                    if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN):
                        return
                    log.warning("node_not_annotated", node=node, problem=str(error))
                else:
                    return
                await anyio.sleep(POLL_SECONDS)

        with anyio.CancelScope(shield=True), anyio.move_on_after(TAKE_BACK_SECONDS):
            async with anyio.create_task_group() as group:
                for node in sorted(self._asked):
                    group.start_soon(one, node)

    def _late(self, seconds: float) -> str:
        known = "; ".join(
            f"node {node}: {text}" if node else text
            for node, text in sorted(self.problems.items())[:MOST_NAMED]
        )
        more = f" and {len(self.problems) - MOST_NAMED} more" if len(self.problems) > MOST_NAMED else ""
        return (
            f"the nodes were not clean within {seconds:g} s: {known or 'no agent was asked'}{more}. "
            "The agents are back in service; repair this and uninstall again, or leave these nodes as they "
            "are with helm uninstall --no-hooks"
        )


def _path(node: str) -> str:
    return f"/api/v1/nodes/{node}"
