"""Waits for NVML's events in a thread of its own and hands them on at once.

One event set holds all GPUs, each registered once. A wait that fails is tried again after growing
pauses with a set made again, so that neither a sick driver nor a lost GPU in the set can make the loop
spin; until then, and for GPUs without events, probing alone watches. Transitions are logged, tries are not.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import structlog

from agent.kit.tasks import Backoff
from agent.nvml.nvml_errors import NvmlError, NvmlGpuLost, NvmlHung, NvmlNotSupported
from agent.nvml.port import NvmlEvent, NvmlPort
from agent.nvml.worker_thread import WorkerThread

log = structlog.get_logger()

# A slice bounds how long stopping takes; longer ones save little (0.07 % of a core at this length).
SLICE_SECONDS: Final = 1.0
GRACE_SECONDS: Final = 2.0  # how much longer than asked for a wait may take before it counts as hung
RETRY_SECONDS: Final = 10.0  # between tries to register a GPU that refused
FINE_AFTER_SECONDS: Final = 10.0  # a set that waited this long without a failure is taken to be well


class EventWatch:
    """The event loop. `targets` answers the UUIDs that should be watched now, `changed` awaits others."""

    def __init__(
        self,
        nvml: NvmlPort,
        thread: WorkerThread,
        targets: Callable[[], frozenset[str]],
        changed: Callable[[], Awaitable[object]],
        deliver: Callable[[NvmlEvent], Awaitable[None]],
    ) -> None:
        self._nvml = nvml
        self._thread = thread
        self._targets = targets
        self._changed = changed
        self._deliver = deliver
        self._registered: set[str] = set()
        self._stale: set[str] = set()  # registered, but gone since: their registration is worth nothing
        self._unsupported: set[str] = set()
        self._refused: dict[str, tuple[float, str]] = {}  # UUID -> when to try again, what it said
        self._backoff = Backoff(first=0.1, longest=30.0)
        self._failing_since: float | None = None
        self._fine_since: float | None = None
        self._mute = False  # a wait hangs
        self._deaf = False  # the newest wait failed
        self.problem: str | None = None
        self.failures = 0

    @property
    def watched(self) -> frozenset[str]:
        """GPUs whose events arrive; all others are watched by probing alone."""
        return frozenset() if self._deaf else frozenset(self._registered - self._stale)

    async def run(self) -> None:
        """Wait for events until cancelled, then let go of the event set. NVML must be open meanwhile."""
        self._forget()
        try:
            while True:
                try:
                    await self._keep_registered()
                    if not self._registered:
                        with anyio.move_on_after(RETRY_SECONDS):
                            await self._changed()
                        continue
                    event = await self._wait()
                except NvmlHung as error:
                    self._mute = True
                    self._failed(error)
                    # The worker refuses to wait again until the call that hangs came back.
                    await anyio.sleep(self._backoff.next())
                    continue
                except NvmlError as error:
                    self._failed(error)
                    await self._drop_set()
                    await anyio.sleep(self._backoff.next())
                    continue
                self._went_well()
                if event is not None:
                    await self._deliver(event)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drop_set()

    async def _wait(self) -> NvmlEvent | None:
        return await self._thread.run(
            self._nvml.wait, round(SLICE_SECONDS * 1000), deadline=SLICE_SECONDS + GRACE_SECONDS
        )

    async def _keep_registered(self) -> None:
        targets = self._targets()
        self._stale |= self._registered - targets
        if self._stale & targets and not self._mute:  # gone and back: only a new set hears of them again
            await self._drain()
            await self._drop_set()
        now = anyio.current_time()
        for uuid in sorted(targets - self._registered - self._unsupported):
            if self._refused.get(uuid, (0.0, ""))[0] <= now:
                await self._register(uuid, now)

    async def _register(self, uuid: str, now: float) -> None:
        try:
            kinds = await self._thread.run(self._nvml.watch, uuid)
        except NvmlNotSupported as error:
            self._unsupported.add(uuid)
            log.info("gpu_events_unsupported", gpu=uuid, problem=str(error), instead="probing alone")
        except NvmlError as error:
            said = str(error)
            if self._refused.get(uuid, (0.0, ""))[1] != said and not isinstance(error, NvmlGpuLost):
                log.warning("gpu_events_refused", gpu=uuid, problem=said, instead="probing alone")
            self._refused[uuid] = (now + RETRY_SECONDS, said)
        else:
            self._registered.add(uuid)
            self._refused.pop(uuid, None)
            log.debug("gpu_events_watched", gpu=uuid, kinds=sorted(kind.value for kind in kinds))

    async def _drain(self) -> None:
        """Hand on what already waits in the set that is about to go."""
        while event := await self._thread.run(self._nvml.wait, 0):
            await self._deliver(event)

    async def _drop_set(self) -> None:
        if self._mute:
            return  # freeing a set in which a thread waits is undefined
        self._forget()
        try:
            await self._thread.run(self._nvml.unwatch_all)
        except NvmlError as error:
            log.debug("event_set_not_freed", problem=str(error))

    def _forget(self) -> None:
        self._registered.clear()
        self._stale.clear()

    def _failed(self, error: NvmlError) -> None:
        self.failures += 1
        self._deaf = True
        self._fine_since = None
        if self.problem is None:
            self._failing_since = anyio.current_time()
            log.error("event_wait_failing", problem=str(error), instead="probing alone")
        self.problem = str(error)

    def _went_well(self) -> None:
        self._mute = self._deaf = False
        if self.problem is None:
            return
        now = anyio.current_time()
        self._fine_since = self._fine_since or now
        # A set that fails every other time must neither flood the log nor reset the pauses.
        if now - self._fine_since >= FINE_AFTER_SECONDS:
            since = self._failing_since or now
            log.info("event_wait_recovered", after_seconds=round(now - since, 1))
            self.problem = self._fine_since = self._failing_since = None
            self._backoff.reset()
