"""Invariants that hold after every step. Exceptions, and where they come from, stand in README.md."""

from collections import deque
from collections.abc import Callable

import anyio

from agent.model.modes import MODE_OF_UNIT, Mode, parse
from agent.model.placement import ASSIGNED, HINT
from agent.model.pod import VGPU
from agent.modes.planner import Phase
from agent.simulator.kubelet.api_server import Pod
from tests.storm.attribution import Limits
from tests.storm.claim_rules import ClaimRules
from tests.storm.excuses import Excuses
from tests.storm.grown import grown_of
from tests.storm.holders import MODES, Held, Holders
from tests.storm.lingering import Lingerers
from tests.storm.mps_service import MpsService
from tests.storm.offers import Offers
from tests.storm.views import Views
from tests.storm.world import World

TAINT_SECONDS = 20.0  # that the taint may stand while no mode is being changed
# That a change may be announced while the old mode is in force: `agent.node.withdrawal.SWITCH`. Pods
# that are bound get their devices first, for 120 s at most.
ANNOUNCED_SECONDS = 140.0
STATUS_SECONDS = 15.0  # the kubelet copies its counts into node.status every 10 s
STARTED_SECONDS = 30.0  # in which an agent that has just started finds out who holds what
MINUTE = 60.0
# API writes of a minute: so many, and so many more for each event in it.
WRITES, WRITES_PER_EVENT = 60, 12


class Violation(AssertionError):
    """An invariant does not hold."""


class Lasting:
    """For how long something has been so, as far as has been looked."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, *, holds: bool) -> float:
        """How long it has, now that it does, or does not."""
        now = anyio.current_time()
        self._since = None if not holds else now if self._since is None else self._since
        return 0.0 if self._since is None else now - self._since


class Invariants:
    """All that is looked at after every step; `looks` counts how often each was."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.holders = Holders(world)
        self.looks = 0
        self.found: list[str] = []  # seen between two looks
        self._checked: tuple[object, ...] | None = None
        self._modes: dict[str, Mode] = {}  # of GPUs that are held
        self._api_well, self._settled, self._up, self._announced = Lasting(), Lasting(), Lasting(), Lasting()
        self._offers: dict[str, Lasting] = {}
        self._lists: dict[str, object] = {}  # the kubelet's, by resource, as last looked at
        self._events: deque[float] = deque()
        self._written = 0
        self.excuses = Excuses(world)
        self._offered = Offers(world, self.holders, self.excuses)
        self._views = Views(world)
        self._mps = MpsService(world)
        self._limits = Limits(world)
        self._claims = ClaimRules(world)
        self._lingerers = Lingerers(world, self.excuses)
        world.on_write.append(self._assigned)
        self._each: tuple[Callable[[], None], ...] = (
            self._units_have_one_holder,
            self._gpus_have_one_mode,
            self._nothing_is_taken,
            self._grown_units_are_nobody_elses,
            self._processes_live,
            self._tasks_live,
            self._taint_goes,
            self._status_offers_what_is_listed,
            self._writes_are_few,
            self._free_units_are_offered,
            self._agent_is_up_to_date,
            self._mps_serves,
            self._lingerers_keep_their_gpu,
            self._limits_stay,
            self._lost_devices_are_kept,
            self._parts_stay,
            self._claims_are_kept,
        )

    def event(self) -> None:
        """A step begins."""
        self._events.append(anyio.current_time())

    def look(self) -> None:
        """Look at all. Raises Violation."""
        self.excuses.note()
        for each in self._each:
            each()
        self.looks += len(self._each)
        if self.found:
            raise Violation(self.found[0])

    def _units_have_one_holder(self) -> None:
        if (now := self.holders.signature()) == self._checked:
            return
        held = self.holders.held()
        self._modes = one_holder(held)
        self._checked = now

    def _gpus_have_one_mode(self) -> None:
        for gpu, modes in self.holders.listed().items():
            if len(modes) > 1:
                raise Violation(f"{gpu} stands on lists of {sorted(mode.value for mode in modes)}")
            mode = self._modes.get(gpu)
            if mode is not None and mode not in modes:
                raise Violation(f"{gpu} is held as {mode.value} and on lists of {next(iter(modes)).value}")

    def _nothing_is_taken(self) -> None:
        world = self._world
        agent, current = world.running, world.current
        if agent is None or current is None:
            return
        if anyio.current_time() - current.began < STARTED_SECONDS:
            return
        for each in agent.switcher.state.value.gpus:
            mode = self._modes.get(each.uuid)
            if mode is not None and each.active.mode not in (mode, Mode.OFF):
                raise Violation(f"{each.uuid} is held as {mode.value} and was made {each.active.mode.value}")

    def _grown_units_are_nobody_elses(self) -> None:
        grown = grown_of(self._world.running)
        if not grown:
            return
        held = {each for parts in self.holders.held().values() for ids in parts.values() for each in ids}
        for ids in grown.values():
            if both := ids & held:
                raise Violation(f"{min(both)} is held, and a container has grown by it")

    def _lost_devices_are_kept(self) -> None:
        world = self._world
        if (agent := world.running) and (text := world.lost_devices.given_up(agent, world.lives)):
            raise Violation(text)

    def _processes_live(self) -> None:
        world = self._world
        if world.kubelet.panics:
            raise Violation(f"the kubelet panicked: {world.kubelet.panics}")
        for run in world.runs:
            if run.failure is not None:
                raise Violation(f"the agent ended by itself: {run.failure!r}")
            if run.overdue:
                raise Violation("the agent did not end in time after SIGTERM")

    def _tasks_live(self) -> None:
        agent = self._world.running
        for state in agent.core.supervisor.states.values() if agent else ():
            if state.restarts and self._world.current and not self._world.current.life.dead:
                raise Violation(f"task {state.name} failed: {state.last_error}")

    def _taint_goes(self) -> None:
        world = self._world
        agent = world.running
        state = agent.switcher.state.value if agent else None
        other = bool(agent and state and agent.switcher._desired.value.name != state.desired)
        announced = self._announced.seconds(holds=other) <= ANNOUNCED_SECONDS and other
        switching = state is None or state.phase is Phase.SWITCHING or announced
        well = self._api_well.seconds(holds=world.api_well)
        settled = self._settled.seconds(holds=not switching)
        if world.tainted is None:
            return
        # A long outage comes and goes between two looks.
        lasts = min(well, settled, anyio.current_time() - max(world.tainted, world.outage))
        if lasts > TAINT_SECONDS:
            raise Violation(f"the taint has stood for {lasts:.0f} s while no mode is being changed")

    def _status_offers_what_is_listed(self) -> None:
        kubelet = self._world.kubelet
        up = self._up.seconds(holds=self._world.kubelet_up.is_set() and kubelet._life is not None)
        for resource, count in kubelet.allocatable.items():
            listed = kubelet.known_devices(resource)
            lasting = self._offers.setdefault(resource, Lasting())
            # A list that came between two looks may have had as many as was offered.
            lists = kubelet._life.devices.tables.healthy.get(resource) if kubelet._life else None
            if lists is not self._lists.get(resource):
                self._lists[resource] = lists
                lasting.seconds(holds=False)
            lasts = lasting.seconds(holds=count > listed)
            if min(lasts, up) > STATUS_SECONDS:
                raise Violation(
                    f"node.status has offered {count} of {resource} for {lasts:.0f} s; the kubelet's lists "
                    f"have {listed}"
                )

    def _writes_are_few(self) -> None:
        since, writes = anyio.current_time() - MINUTE, self._world.writes
        while self._events and self._events[0] < since:
            self._events.popleft()
        while self._written < len(writes) and writes[self._written][0] < since:
            self._written += 1
        count = len(writes) - self._written
        if count > WRITES + WRITES_PER_EVENT * len(self._events):
            last = [each[1] for each in writes[-3:]]
            raise Violation(f"{count} API writes in a minute with {len(self._events)} events: {last}")

    def _free_units_are_offered(self) -> None:
        if text := self._offered.withheld():
            raise Violation(text)

    def _agent_is_up_to_date(self) -> None:
        if text := self._views.outdated():
            raise Violation(text)
        self.found += self._views.found

    def _mps_serves(self) -> None:
        if text := self._mps.wrong():
            raise Violation(text)

    def _lingerers_keep_their_gpu(self) -> None:
        if text := self._lingerers.offered():
            raise Violation(text)

    def _parts_stay(self) -> None:
        if text := self._world.parts.wrong(self._world):
            raise Violation(text)

    def _limits_stay(self) -> None:
        if text := self._limits.gone():
            raise Violation(text)

    def _claims_are_kept(self) -> None:
        if text := self._claims.wrong(self._modes):
            raise Violation(text)

    def _assigned(self, method: str, path: str, body: object) -> None:
        """`gpu-assigned` says that every choice was carried out: each stands beside it."""
        _, _, rest = path.partition("/namespaces/")
        if method != "PATCH" or "/pods/" not in rest or not isinstance(body, dict):
            return
        written = body.get("metadata", {}).get("annotations") or {}
        namespace, _, name = rest.partition("/pods/")
        pod = self._world.kubelet.api.pods.get((namespace, name))
        if written.get(ASSIGNED) != "true" or pod is None:
            return
        if body.get("metadata", {}).get("uid", pod.api_uid) != pod.api_uid:
            return  # a write to an earlier pod of this name, which is refused
        missing = [key for key in self._choices(pod) if key not in written and key not in pod.written]
        current = self._world.current
        # What a life granted that was killed before it wrote is written by nobody.
        if (
            missing
            and current is not None
            and self._world.created.get((namespace, name), 0.0) > current.began
        ):
            self.found.append(f"{ASSIGNED} was written to pod {name} without {', '.join(missing)}")

    def _choices(self, pod: Pod) -> list[str]:
        """Annotations with the GPUs of each container that asks for a share: app containers come first.

        One that has started without devices, before the kubelet knew of any, got no GPU.
        """
        kubelet = self._world.kubelet
        tables = kubelet._life.devices.tables if kubelet._life else None
        containers = (*pod.spec.containers, *pod.spec.init_containers)
        return [
            f"{HINT}{number}"
            for number, each in enumerate(containers)
            if MODES.keys() & each.limits.keys()
            and not (
                tables is not None
                and (pod.uid, each.name) in kubelet._machine.containers.views
                and not tables.pods.of_container(pod.uid, each.name)
            )
        ]


def one_holder(held: Held) -> dict[str, Mode]:
    """The mode in which each GPU is held. Raises Violation where a unit or a GPU is held twice."""
    modes: dict[str, tuple[Mode, str]] = {}
    owner: dict[str, str] = {}
    for uid, parts in held.items():
        gpus: dict[str, dict[str, set[str]]] = {}
        for (container, resource), ids in parts.items():
            for each in sorted(ids):
                if owner.setdefault(each, uid) != uid:
                    raise Violation(f"{each} is held by pods {owner[each]} and {uid}")
                device = parse(each)
                mode = MODE_OF_UNIT[device.unit]
                before, holder = modes.setdefault(device.gpu, (mode, uid))
                if before is not mode:
                    raise Violation(
                        f"{device.gpu} is held as {before.value} by {holder}, as {mode.value} by {uid}"
                    )
                gpus.setdefault(container, {}).setdefault(resource, set()).add(device.gpu)
        for container, found in gpus.items():
            core, memory = found.get(VGPU.core), found.get(VGPU.memory)
            if core and memory and core != memory:
                raise Violation(f"pod {uid} container {container}: cores on {core}, memory on {memory}")
    return {gpu: mode for gpu, (mode, _) in modes.items()}
