"""The commands that the running agent takes from people: `status`, `clear-health`, `release`, `cordon`."""

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

import anyio
import structlog

from agent.cluster.api import ApiError
from agent.inventory.reducer import Cleared, Removed
from agent.inventory.snapshot import GpuState, Snapshot, boot_seconds
from agent.model.health import FaultKind, HealthState
from agent.model.holding import Record
from agent.modes.wing import Document
from agent.modes.withholding import LONGEST_REASON, CordonsUnreadable
from agent.status.report import StatusSources, report
from agent.web.control import CommandRefused, ControlServer

log = structlog.get_logger()

LONGEST_RELEASE_SECONDS = 86400.0
TAKE_EFFECT_SECONDS = 4.0
HOLDERS_SECONDS = 3.0  # a kubelet that says nothing is reported after two; who asks for the status waits ten
CLOSE_SECONDS = 20.0  # calls under way end first, each within its deadline


class Commands:
    """Handlers; `add_to` puts them on the control socket."""

    def __init__(self, sources: StatusSources) -> None:
        self._sources = sources

    def add_to(self, server: ControlServer) -> None:
        server.add("status", self._status)
        server.add("clear-health", self._clear)
        server.add("release", self._release)
        server.add("cordon", self._cordon)
        server.add("uncordon", self._uncordon)

    async def _status(self, _: Mapping[str, object]) -> Document:
        await self._holders()  # their timer is slow, and a person wants the present
        return report(self._sources)

    async def _clear(self, request: Mapping[str, object]) -> Document:
        state = self._named(str(request.get("gpu", "")))
        health = state.health
        name = f"GPU {state.uuid} (index {state.gpu.index})"
        if request.get("removed"):
            return await self._forget(state, name)
        if health.state is HealthState.HEALTHY:
            raise CommandRefused(f"{name} is healthy already")
        if health.away or health.misses:
            raise CommandRefused(
                f"{name} cannot be cleared while it does not answer: {health.obstacle or health.cause}; "
                "bring it back first (reset or reboot)"
                + (", or say --removed if it was taken out of the machine" if health.away else "")
            )
        if health.driver_asks or (health.fault and health.fault.kind is FaultKind.REMAP):
            remedy = self._sources.inventory.rules.remedy(health)
            raise CommandRefused(f"{name} cannot be cleared, since {health.obstacle}: {remedy}")
        log.warning("health_cleared_by_hand", gpu=state.uuid, index=state.gpu.index, cause=health.cause)
        inventory = self._sources.inventory
        await inventory.mailbox.post(Cleared(state.uuid, boot_seconds()))
        await self._wait(lambda now: now.by_uuid[state.uuid].health is not health)
        return {"uuid": state.uuid, "index": state.gpu.index, "was": health.cause}

    async def _forget(self, state: GpuState, name: str) -> Document:
        if not state.health.away:
            raise CommandRefused(f"{name} is still there: the driver lists it; nothing is forgotten")
        log.warning("gpu_forgotten_by_hand", gpu=state.uuid, index=state.gpu.index, cause=state.health.cause)
        await self._sources.inventory.mailbox.post(Removed(state.uuid))
        await self._wait(lambda now: state.uuid not in now.by_uuid)
        return {"uuid": state.uuid, "index": state.gpu.index, "was": state.health.cause}

    async def _release(self, request: Mapping[str, object]) -> Document:
        if request.get("end"):
            self._sources.gpu_monitor.end_release()
            await self._wait(lambda now: now.released_until is None)
            return {"releasedForSeconds": None}
        seconds = request.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise CommandRefused("say for how long: release --for 10m")
        if not 1 <= seconds <= LONGEST_RELEASE_SECONDS:
            raise CommandRefused("NVML can be released for 1 s to 24 h")
        log.warning("release_asked_for", seconds=seconds)
        # An earlier release may stand, whose closing failed: what this one makes of it is waited for.
        earlier = (None, self._sources.inventory.snapshot.value.released_until)
        self._sources.gpu_monitor.release(float(seconds))
        await self._wait(
            lambda now: now.released_until not in earlier and now.let_go is not None, CLOSE_SECONDS
        )
        if problem := self._sources.inventory.snapshot.value.let_go:
            raise CommandRefused(
                f"NVML cannot be closed: {problem}; nothing of this node is handed out, but the agent still "
                "holds the driver: do not reset a GPU now. End it with release --end, or end the agent's "
                "process, which lets go of the driver"
            )
        return {"releasedForSeconds": seconds}

    async def _cordon(self, request: Mapping[str, object]) -> Document:
        book, state = self._sources.cordons, self._named(str(request.get("gpu", "")))
        reason = " ".join(str(request.get("reason") or "").split())
        if len(reason) > LONGEST_REASON:
            raise CommandRefused(f"say why in {LONGEST_REASON} characters at most")
        log.warning("cordon_asked_for", gpu=state.uuid, index=state.gpu.index, reason=reason or None)
        await self._written(book.add(state.uuid, reason))
        listed, age = await self._holders(), None
        if listed is None:
            # A kubelet that is slow has not answered yet, and no reading has failed.
            listed, lost = self._sources.last.known()
            since = monotonic() - self._sources.holdings.began if lost is None else lost
            age = None if listed is None else round(since, 1)
        pods = sorted({each.pod for each in listed.by_gpu.get(state.uuid, [])}) if listed else None
        return {
            "uuid": state.uuid,
            "index": state.gpu.index,
            "waitingFor": pods,  # null: nobody has ever said who holds it
            "holdersAgeSeconds": age,
        }

    async def _uncordon(self, request: Mapping[str, object]) -> Document:
        book, state = self._sources.cordons, self._named(str(request.get("gpu", "")))
        known = book.cell.value.get(state.uuid)
        if known is None:
            raise CommandRefused(f"GPU {state.uuid} (index {state.gpu.index}) is not cordoned")
        log.warning("uncordon_asked_for", gpu=state.uuid, index=state.gpu.index)
        await self._written(book.remove(state.uuid))
        return {"uuid": state.uuid, "index": state.gpu.index, "was": known.words}

    async def _holders(self) -> Record | None:
        """Who holds what now; None: the kubelet has not said so in time for who waits for the answer."""
        with anyio.move_on_after(HOLDERS_SECONDS):
            return await self._sources.holdings.refresh()
        return None

    @staticmethod
    async def _written(write: Awaitable[None]) -> None:
        try:
            await write
        except (ApiError, CordonsUnreadable) as error:
            raise CommandRefused(f"the node's annotation cannot be written: {error}; try again") from error

    async def _wait(self, reached: Callable[[Snapshot], bool], seconds: float = TAKE_EFFECT_SECONDS) -> None:
        with anyio.move_on_after(seconds) as late:
            await self._sources.inventory.snapshot.wait_for(reached)
        if late.cancelled_caught:
            raise CommandRefused("the agent took it up, but it has had no effect yet; see its log")

    def _named(self, name: str) -> GpuState:
        gpus = self._sources.inventory.snapshot.value.gpus
        found = [state for state in gpus if name in (state.uuid, str(state.gpu.index))]
        if len(found) == 1:
            return found[0]
        if found:
            raise CommandRefused(f"{len(found)} GPUs have had the index {name}: name it by UUID")
        known = ", ".join(f"{state.gpu.index} = {state.uuid}" for state in gpus) or "none"
        raise CommandRefused(f"this node has no GPU {name!r}; there are: {known}")
