"""What `helm uninstall` runs first: stops the agents, has every node cleaned up, says what stands in the way.

Two DaemonSets take turns by their node selectors: the agents leave all nodes when theirs asks for a label
that no node has, and the cleaners, made with such a selector, come when it is taken from theirs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import structlog

from agent.cleanup.errors import CleanupFailed, CleanupRefused
from agent.cluster.api import ApiError, KubeApi
from agent.cluster.pods import Pod
from agent.model.demand import MPS

log = structlog.get_logger()

# On no node: whoever selects it is away.
AWAY = "gpu-node-agent.io/away"
AGENT, CLEANER = "agent", "cleanup-node"
PAGE = 500
POLL_SECONDS = 1.0
MOST_NAMED = 10
REFUSED_EXIT_CODE = 3


@dataclass(frozen=True, slots=True)
class Release:
    """Names of what an installation consists of."""

    namespace: str
    agents: str  # DaemonSets
    cleaners: str


class _ListMeta(msgspec.Struct, rename={"next": "continue"}):
    next: str = ""


class _PodList(msgspec.Struct):
    items: list[Pod]
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)


class _Status(msgspec.Struct, rename="camel"):
    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_ready: int = 0


class _Metadata(msgspec.Struct):
    generation: int = 0


class _Labels(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = msgspec.field(default_factory=dict)


class _Spec(msgspec.Struct):
    selector: _Labels


class _DaemonSet(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status = msgspec.field(default_factory=_Status)


class _Terminated(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    message: str = ""


class _State(msgspec.Struct):
    terminated: _Terminated | None = None


class _Container(msgspec.Struct, rename="camel"):
    state: _State = msgspec.field(default_factory=_State)
    last_state: _State = msgspec.field(default_factory=_State)

    @property
    def failure(self) -> _Terminated | None:
        """How it last failed, unless it has succeeded since."""
        for each in (self.state.terminated, self.last_state.terminated):
            if each is not None:
                return each if each.exit_code else None
        return None


class _CleanerStatus(msgspec.Struct, rename="camel"):
    init_container_statuses: list[_Container] = msgspec.field(default_factory=list)


class _CleanerSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class _Cleaner(msgspec.Struct):
    spec: _CleanerSpec
    status: _CleanerStatus


class _CleanerList(msgspec.Struct):
    items: list[_Cleaner]


@dataclass
class ClusterCleanup:
    """One run of the hook."""

    api: KubeApi
    release: Release
    problems: dict[str, str] = field(default_factory=dict)  # of nodes, by name

    async def run(self, timeout_seconds: float) -> int:
        """Clean all nodes; how many. Raises CleanupFailed, with the agents back in service."""
        try:
            await self._refuse_holders()
            log.info("agents_stopping", daemonset=self.release.agents)
            with anyio.move_on_after(timeout_seconds):
                await self._send_away(self.release.agents, True)
                await self._wait_gone()
                await self._send_away(self.release.cleaners, False)
                return await self._wait_clean()
            raise CleanupFailed(self._late(timeout_seconds))
        except (CleanupFailed, ApiError) as error:
            await self._back_in_service()
            if isinstance(error, ApiError):
                raise CleanupFailed(str(error)) from error
            raise

    async def _refuse_holders(self) -> None:
        held = [
            f"{pod.metadata.namespace}/{pod.metadata.name} (node {pod.spec.node_name})"
            async for pod in self._pods()
            if pod.asks_for({MPS.core, MPS.memory}) and pod.spec.node_name and not pod.finished
        ]
        if held:
            more = f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else ""
            raise CleanupRefused(
                f"{len(held)} pod(s) hold MPS shares and would lose their daemon: "
                f"{', '.join(sorted(held)[:MOST_NAMED])}{more}; delete them, or wait until they have ended, "
                "and uninstall again. Nothing was changed"
            )

    async def _pods(self) -> Any:  # noqa: ANN401  an async generator of Pod
        query: dict[str, str] = {"limit": str(PAGE)}
        while True:
            found = msgspec.json.decode(await self.api.get("/api/v1/pods", query), type=_PodList)
            for pod in found.items:
                yield pod
            if not found.metadata.next:
                return
            query["continue"] = found.metadata.next

    def _path(self, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self.release.namespace}/daemonsets/{name}"

    async def _send_away(self, name: str, away: bool) -> None:
        selector: Mapping[str, str | None] = {AWAY: "true" if away else None}
        body = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
        await self.api.merge_patch(self._path(name), body)

    async def _back_in_service(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            for name, away in ((self.release.cleaners, True), (self.release.agents, False)):
                try:
                    await self._send_away(name, away)
                except ApiError as error:
                    log.error("not_back_in_service", daemonset=name, problem=str(error))

    async def _daemon_set(self, name: str) -> _DaemonSet:
        return msgspec.json.decode(await self.api.get(self._path(name)), type=_DaemonSet)

    async def _of(self, name: str) -> list[_Cleaner]:
        """Pods of a DaemonSet."""
        labels = (await self._daemon_set(name)).spec.selector.match_labels
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        path = f"/api/v1/namespaces/{self.release.namespace}/pods"
        return msgspec.json.decode(
            await self.api.get(path, {"labelSelector": selector}), type=_CleanerList
        ).items

    async def _wait_gone(self) -> None:
        while left := await self._of(self.release.agents):
            self.problems = {pod.spec.node_name: "its agent has not ended yet" for pod in left}
            await anyio.sleep(POLL_SECONDS)
        self.problems = {}

    async def _wait_clean(self) -> int:
        while True:
            made = await self._daemon_set(self.release.cleaners)
            status = made.status
            if status.observed_generation >= made.metadata.generation:
                if status.number_ready >= status.desired_number_scheduled:
                    return status.desired_number_scheduled
                await self._look_at_cleaners()
            await anyio.sleep(POLL_SECONDS)

    async def _look_at_cleaners(self) -> None:
        self.problems = {}
        for pod in await self._of(self.release.cleaners):
            for container in pod.status.init_container_statuses:
                if failure := container.failure:
                    text = _last_line(failure.message) or f"exit code {failure.exit_code}"
                    self.problems[pod.spec.node_name] = text
                    if failure.exit_code == REFUSED_EXIT_CODE:
                        raise CleanupRefused(f"node {pod.spec.node_name}: {text}")

    def _late(self, seconds: float) -> str:
        told = "; ".join(f"node {node}: {text}" for node, text in sorted(self.problems.items())[:MOST_NAMED])
        return (
            f"the nodes were not clean within {seconds:g} s: {told or 'cleaners did not start'}. The agents "
            "are back in service; repair this and uninstall again, or leave these nodes as they are with "
            "helm uninstall --no-hooks"
        )


def _last_line(text: str) -> str:
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-1].strip() if lines else ""
