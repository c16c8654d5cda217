"""What a GPU goes through between two modes: tear down, set up, each GPU in a task of its own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.kit.backoff import Backoff
from agent.model.gpu import Gpu
from agent.model.modes import OFF, GpuMode, Mode
from agent.modes.ports import Backend, SetUpFailed

log = structlog.get_logger()

BETWEEN = "between two modes"


@dataclass
class Change:
    """One GPU on its way. Nobody holds it any more, and nothing of it is sold."""

    gpu: Gpu
    leaving: Mode  # torn down first; OFF: there is nothing to tear down
    wanted: GpuMode
    previous: GpuMode = OFF  # back in force when the set-up fails; OFF: none
    running: bool = True
    problem: str = ""
    retry_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(first=1.0, longest=60.0))

    @property
    def ready(self) -> bool:
        """Whether the new mode is set up and may be sold."""
        return not self.running and not self.problem

    def waits(self, wanted: GpuMode) -> bool:
        """Whether the same was tried, failed, and its next try is not due yet."""
        return bool(self.problem) and self.wanted == wanted and self.retry_at > anyio.current_time()


class Changes:
    """All changes of the node; GPUs do not wait for each other."""

    def __init__(
        self,
        backends: Mapping[Mode, Backend],
        publish: Callable[[Mapping[str, GpuMode]], None],
        wake: Callable[[], None],
    ) -> None:
        self._backends = backends
        self._publish = publish
        self._wake = wake
        self._by_gpu: dict[str, Change] = {}

    def of(self, uuid: str) -> Change | None:
        """The change of a GPU: under way, ready to be sold, or failed."""
        return self._by_gpu.get(uuid)

    def begin(self, changes: Iterable[Change], group: TaskGroup) -> None:
        """Begin; GPUs that nothing has to be done for are ready at once."""
        left: dict[str, GpuMode] = {}
        for change in changes:
            uuid = change.gpu.uuid
            known = self._by_gpu.get(uuid)
            if known and known.wanted == change.wanted:
                change.backoff = known.backoff
            self._by_gpu[uuid] = change
            down, up = self._backends.get(change.leaving), self._backends.get(change.wanted.mode)
            if down is None and change.leaving is not Mode.OFF:
                left[uuid] = replace(OFF, reason=change.wanted.reason or BETWEEN)
            if down or up:
                group.start_soon(self._run, change)
            else:
                change.running = False
        if left:
            self._publish(left)

    def done(self, uuids: Iterable[str]) -> None:
        """These are sold, or off as wanted: nothing of their change is left to remember."""
        for uuid in uuids:
            if (change := self._by_gpu.get(uuid)) and not change.running:
                del self._by_gpu[uuid]

    def forget_running(self) -> None:
        """Drop what was under way in a task group that has ended: nobody would ever end it."""
        for uuid in [uuid for uuid, change in self._by_gpu.items() if change.running]:
            del self._by_gpu[uuid]

    def forget_failed(self, targets: Mapping[str, GpuMode]) -> None:
        """Drop failures of what nobody wants any more."""
        for uuid, change in tuple(self._by_gpu.items()):
            if change.problem and not change.running and targets.get(uuid) != change.wanted:
                del self._by_gpu[uuid]

    def ready(self, targets: Mapping[str, GpuMode]) -> dict[str, GpuMode]:
        """What may be sold now, and is still wanted."""
        return {
            uuid: change.wanted
            for uuid, change in self._by_gpu.items()
            if change.ready and targets.get(uuid) == change.wanted
        }

    def problems(self) -> dict[str, str]:
        """Why set-ups failed, by UUID."""
        return {uuid: change.problem for uuid, change in self._by_gpu.items() if change.problem}

    def next_try(self) -> float | None:
        """Seconds until the first failed set-up is tried again; None: none failed."""
        times = [change.retry_at for change in self._by_gpu.values() if change.problem]
        return max(0.05, min(times) - anyio.current_time()) if times else None

    async def _run(self, change: Change) -> None:
        uuid = change.gpu.uuid
        if backend := self._backends.get(change.leaving):
            await backend.tear_down(change.gpu)
            self._publish({uuid: replace(OFF, reason=change.wanted.reason or BETWEEN)})
        if backend := self._backends.get(change.wanted.mode):
            try:
                await backend.set_up(change.gpu)
            except SetUpFailed as error:
                change.problem = str(error)
                change.retry_at = anyio.current_time() + change.backoff.next()
                mode = change.wanted.mode.value
                log.error("mode_set_up_failed", gpu=uuid, mode=mode, problem=change.problem)
                await self._go_back(change)
        change.running = False
        self._wake()

    async def _go_back(self, failed: Change) -> None:
        """After a failed set-up the GPU is sold as before rather than not at all."""
        uuid, previous = failed.gpu.uuid, replace(failed.previous, selling=True, leaving=False, reason="")
        if failed.previous.mode is failed.wanted.mode and failed.leaving is Mode.OFF:
            return  # it is in that mode, with pods on it: their units stay listed
        if previous.mode is Mode.OFF:
            self._publish({uuid: replace(OFF, reason=failed.problem)})
            return
        try:
            if backend := self._backends.get(previous.mode):
                await backend.set_up(failed.gpu)
        except SetUpFailed as error:
            self._publish({uuid: replace(OFF, reason=f"{failed.problem}; and back again: {error}")})
        else:
            self._publish({uuid: previous})
