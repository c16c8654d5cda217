"""Excuses for units that are not offered and pods that are refused: by cause, by GPU, for a time.

A cause excuses what it reaches and nothing else: a hung MPS daemon the shares of its own GPU, an API server
that is away only shares (whole GPUs are granted without it), and each only for as long as the agent may need
to get over it. `Tally` counts how often an excuse was needed.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import anyio

from agent.app.agent import Agent
from agent.inventory.snapshot import GpuState
from agent.model.health import LOST_QUIET_SECONDS, HealthState, Rules
from agent.model.modes import Mode
from tests.storm import seams
from tests.storm.holders import MODES
from tests.storm.lives import AgentRun
from tests.storm.world import World

LONG = 1e9  # seconds: for as long as the cause lasts
# For so many seconds after its end a cause excuses still; and so long at most what it excuses may last.
AFTER = {
    "agent": 3.0,  # begins: asks who holds what, and brings its modes into force
    "kubelet": 3.0,  # starts: looks for plugins once in a second
    "stream": 0.5,  # of the GPU's mode is cut
    "gpu": 1.0,  # is not well
    "mode": 2.0,  # of the GPU changes: the kubelet looks for plugins once in a second
    "calls": 2.0,  # are refused, lost or late: a GET may take 1 s
    "api": 6.0,  # ends of pods are known by the next reading of the record at the latest
    "records": 6.0,  # are away, torn or late
    "daemon": 6.0,  # of the GPU is dead, hangs or cannot be judged; `mps_service` says how long
}
LASTS = {"stream": 12.0, "api": 20.0}
# Reach shares alone: whole GPUs are granted without them, but for those that were handed out before
# (`admission.NOT_READ`).
SHARES = ("api", "records")
UNDER_WAY = ("agent", "kubelet", "mode")
SLOW_SECONDS = 0.2  # beyond which a reading is late
HURT_SECONDS = 420.0  # after an Xid or a return, for which a GPU may be unhealthy: `liveness.CALM_SECONDS`
MET_SECONDS = 5.0  # after which an agent has seen that NVML works again
# After NVML has failed: until it is probed, and the probation of a GPU that it did not list, or lost.
PROBED_SECONDS = LOST_QUIET_SECONDS + 10.0


@dataclass
class Tally:
    """How often was looked, and how often what was found needed an excuse."""

    looks: int = 0
    excused: int = 0

    def count(self, *, excused: bool) -> None:
        """One look."""
        self.looks += 1
        self.excused += excused


def excused(figures: Collection[tuple[int, int]]) -> float:
    """How many percent of the looks of several storms were excused."""
    looks = sum(each[0] for each in figures)
    return round(100 * sum(each[1] for each in figures) / looks, 1) if looks else 0.0


def excused_of(excuses: "Excuses | None") -> Iterator[tuple[int, int]]:
    """Looks and excused ones of GPUs, of pods, and of refused pods; pods, and those that were no look."""
    none = (Tally(),) * 4
    tallies = (excuses.offers, excuses.admissions, excuses.refusals, excuses.unwell) if excuses else none
    for each in tallies:
        yield each.looks, each.excused


class Excuses:
    """Causes, and when each was there last."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: dict[str, float] = {}
        self._life: AgentRun | None = None
        self._modes: dict[str, object] = {}
        self._nvml_met = -LONG  # when an agent had seen that NVML works again
        self._unwell: set[str] = set()  # GPUs that were hurt when it looked last
        self._begun: dict[str, float] = {}  # causes that last, and since when at the earliest
        self._since = anyio.current_time()  # when was looked last
        # Of GPUs, of pods that were admitted or refused, and of the refused alone.
        self.offers, self.admissions, self.refusals = Tally(), Tally(), Tally()
        self.unwell = Tally()  # of pods, and of those that fitted only where nobody could offer anything

    def __str__(self) -> str:
        return " ".join(f"{excused}/{looks}" for looks, excused in excused_of(self))

    def note(self) -> None:
        """Look which causes there are now."""
        now, found, current = anyio.current_time(), set(self._now()), self._world.current
        since = max(self._world.nvml_well, current.began) if current and self._world.running else now
        if self._nvml_met < self._world.nvml_well and now - since > MET_SECONDS:
            self._nvml_met = now
        if self._world.outage > self._last.get("api", -LONG):  # it came and went between two looks
            self._begun.setdefault("api", self._since)
            self._last["api"] = self._world.outage
        # Calls were refused or had no answer, or the kubelet was down, between two looks.
        calls = max(self._world.refused, self._world.unanswered or -LONG)
        self._last["calls"] = max(self._last.get("calls", -LONG), calls)
        self._last["kubelet"] = max(self._last.get("kubelet", -LONG), self._world.kubelet_began)
        if seams.KUBELET.lagged > self._last.get("records", 0.0):  # an answer that was late for somebody
            self._begun.setdefault("records", self._since)
            self._last["records"] = seams.KUBELET.lagged
        # A call that a lost stream ends is refused before the kubelet has marked its endpoint.
        for resource, at in self._world.dropped.items():
            stream = f"stream {MODES.get(resource, Mode.PGPU).value}"
            self._last[stream] = max(self._last.get(stream, -LONG), at)
        for each in SHARES:
            if each in found:
                self._begun.setdefault(each, self._since)
            elif now - self._last.get(each, -LONG) > AFTER[each]:
                self._begun.pop(each, None)
        self._since = now
        if not found.isdisjoint(SHARES):
            # What is under way takes longer: nobody says what is asked for, or who holds what.
            for each, last in self._last.items():
                kind = each.partition(" ")[0]
                if kind in UNDER_WAY and now - last <= AFTER[kind]:
                    self._last[each] = now
        self._last.update(dict.fromkeys(found, now))

    def of(self, uuid: str, mode: Mode, lasts: float = 0.0, *, answered: bool = False) -> str | None:
        """The cause that excuses what is wrong with this GPU, and has been so long; None: there is none.

        `answered`: the agent was asked, and asks for what a mute watch does not show.
        """
        now, last = anyio.current_time(), self._last
        # While the GPU changed its mode nothing else was to blame.
        lasts = min(lasts, now - last.get(f"mode {uuid}", -LONG))
        names = ["agent", "kubelet", f"stream {mode.value}", f"gpu {uuid}", f"mode {uuid}"]
        if mode is not Mode.PGPU:
            names += ("calls", "records") if answered else SHARES
        if mode is Mode.MPS:
            names.append(f"daemon {uuid}")
        for each in names:
            kind = each.partition(" ")[0]
            if now - last.get(each, -LONG) <= AFTER[kind] and lasts <= self._most(kind):
                return kind
        return None

    def records_are_away(self) -> bool:
        """Whether nobody could read who holds what just now, of whatever mode."""
        return anyio.current_time() - self._last.get("records", -LONG) <= AFTER["records"]

    def calls_fail(self) -> bool:
        """Whether the API server did not answer calls as it should just now; watches may be mute."""
        return anyio.current_time() - self._last.get("calls", -LONG) <= AFTER["calls"]

    def _most(self, kind: str) -> float:
        """For how many seconds a cause excuses something."""
        began = self._begun.get(kind, LONG)
        if kind == "api" and any(self._last.get(each, -LONG) >= began for each in ("agent", "kubelet")):
            return LONG  # who has just started knows of no end that the API server alone has seen
        return LASTS.get(kind, LONG)

    def applies(self, uuid: str) -> bool:
        """Whether there are an agent and a kubelet, and the GPU is well: else nobody could offer it."""
        world, agent = self._world, self._world.running
        if agent is None or ends(world.current) or not self._kubelet_is_up():
            return False
        state = next((each for each in agent.core.inventory.snapshot.value.gpus if each.uuid == uuid), None)
        return state is not None and (state.healthy or not self._hurt(state))

    def sees(self, uuid: str) -> bool:
        """Whether the agent can read a GPU's processes, and the kubelet hears of it."""
        world, streams = self._world, [name for name in self._now() if name.startswith("stream ")]
        return self.applies(uuid) and not (world.nvml_faults or world.lost or streams)

    def _hurt(self, state: GpuState) -> bool:
        """Whether something has happened to a GPU for which it may be unhealthy."""
        world, now = self._world, anyio.current_time()
        slot = next((each for each in world.machine.slots if world.machine.uuid(each) == state.uuid), None)
        if slot is None or slot in world.lost or world.nvml_faults:
            return True
        if self._nvml_met < world.nvml_well or now - self._nvml_met < PROBED_SECONDS:
            return True
        if slot in world.struck and _needs_reset(state):
            return True
        return now - world.hurt.get(slot, -LONG) < HURT_SECONDS

    def _kubelet_is_up(self) -> bool:
        return self._world.kubelet._life is not None and self._world.kubelet_up.is_set()

    def _now(self) -> Iterator[str]:
        world, agent, current = self._world, self._world.running, self._world.current
        if agent is None or ends(current) or current is not self._life:
            self._life = current
            yield "agent"
        life = world.kubelet._life
        if life is None or not self._kubelet_is_up():
            yield "kubelet"
        else:
            for resource, each in life.devices.tables.endpoints.items():
                if each.stopped_at is not None:
                    yield f"stream {MODES.get(resource, Mode.PGPU).value}"
        if not world.api_well or world.http.silent or (agent and _is_behind(agent)):
            yield "api"
        if not world.api_well:
            yield "calls"
        slow = sum(seams.KUBELET.answering) + seams.KUBELET.reading > SLOW_SECONDS
        if seams.KUBELET.records or world.checkpoint is not None or slow or seams.KUBELET.lagging:
            yield "records"
        if agent is not None:
            yield from self._gpus(agent)
        if world.shape.mps:
            yield from self._daemons()

    def _gpus(self, agent: Agent) -> Iterator[str]:
        gpus = agent.core.inventory.snapshot.value.gpus
        hurt = {each.uuid for each in gpus if not each.healthy and self._hurt(each)}
        # One that is well by now has been so since some moment between two looks.
        yield from (f"gpu {uuid}" for uuid in hurt | self._unwell)
        self._unwell = hurt
        state, asked = agent.switcher.state.value, agent.switcher._desired.value
        # One that the agent did not know changes its mode when it is found, whatever it was in before.
        self._modes = {one.uuid: self._modes[one.uuid] for one in state.gpus if one.uuid in self._modes}
        for one in state.gpus:
            # Another mode is asked for: pods that are bound get their devices first, then lists get shorter.
            # Or none is known: what is asked for cannot be obeyed, and nobody remembers what was before.
            if (
                asked.name != state.desired
                or not one.wanted.offered
                or one.active != one.wanted
                or one.active != agent.switcher.assignment.value.of(one.uuid)  # since the last round
                or self._modes.get(one.uuid) != one.active
            ):
                self._modes[one.uuid] = one.active
                yield f"mode {one.uuid}"

    def _daemons(self) -> Iterator[str]:
        world = self._world
        for uuid in world.machine.uuids:
            pipe = world.folder / "run" / "mps" / uuid / "pipe"
            daemons = [each for each in world.daemons.on(pipe) if not each.forged]
            faulty = len(daemons) != 1 or any(each.hangs or each.faulted for each in daemons)
            # Nor is one relied on while NVML does not tell the compute mode of its GPU, which may look well.
            if world.daemons.refuses or faulty or world.nvml_faults:
                yield f"daemon {uuid}"


def _needs_reset(state: GpuState) -> bool:
    """Whether a GPU has a fault that no time ends, only a reset or somebody's word."""
    health = state.health
    if health.state is not HealthState.UNHEALTHY or health.fault is None:
        return False
    return not (health.reset_seen or Rules().of(health.fault).recovers)


def _is_behind(agent: Agent) -> bool:
    """Whether the agent's watch of its pods is being opened again; `views` says for how long."""
    return agent.cluster is not None and agent.cluster.pods.reflector.problem is not None


def ends(current: AgentRun | None) -> bool:
    """Whether an agent is about to end, or has."""
    return current is None or current.life.dead or current.stop.is_set() or current.ended.is_set()
