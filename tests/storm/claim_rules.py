"""The rules of claims (DRA): by the API's objects, by the kubelet's record and by what runs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import anyio

from agent.kubelet.podresources import PATIENCE_SECONDS
from agent.model.modes import WHOLE_GPUS, Mode, units
from agent.model.resource_claim import DRIVER, WORDS, parse_device, pool_of
from agent.simulator.kubelet.api_server import Pod
from agent.simulator.kubelet.claim_state import ClaimInfo
from agent.simulator.kubelet.pod_specs import Phase
from agent.simulator.kubelet.resource_allocation import results
from agent.simulator.kubelet.resource_objects import CLAIMS, SLICES
from tests.storm import seams
from tests.storm.world import World

GIB = 1 << 30
# After which agent and kubelet know the same claims: what was answered counts for 10 s beside the record,
# which is read every 5 s (`agent.dra.ledger`, `agent.dra.door`).
SAME_SECONDS = 40.0
MODE_SECONDS = 30.0  # in which a GPU that runs a claim is in its mode again, for an agent that has begun
# That a pod may wait for its claims while nothing is wrong: the kubelet's resync of 60 to 90 s after a
# failure, and a call to prepare of 40 s.
STARTED_SECONDS = 200.0

Claims = Mapping[str, ClaimInfo]  # by UID


class ClaimRules:
    """Looks at all; `wrong` says what does not hold."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[str, float] = {}
        self._life = 0
        self._amounts: dict[
            str, dict[str, list[tuple[int, int]]]
        ] = {}  # cores and GiB, by claim's UID and GPU
        self._counters: dict[str, object] = {}  # of devices that are allocated
        self._taken = ""  # what the agent deletes, though it is allocated
        world.on_write.append(self._deleted)

    def wrong(self, held: Mapping[str, Mode]) -> str | None:
        """The first fault, in words. `held`: GPUs that plugins' units are held of, with their mode."""
        if not self._world.shape.claims:
            return None
        return self._taken or self._oversold() or self._unlisted() or self._shared(held) or self._lasting()

    # By the API's objects

    def _allocated(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        pool = pool_of(self._world.kubelet.api.node_name)
        for claim in self._world.kubelet.api.resources.of(CLAIMS):
            for each in results(claim):
                if (each["driver"], each["pool"]) == (DRIVER, pool):
                    yield claim["metadata"]["uid"], each

    def _oversold(self) -> str | None:
        """Counters and capacities, as the claims' statuses have them."""
        use: dict[str, list[tuple[str, Mode]]] = defaultdict(list)
        amounts: dict[str, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for uid, each in self._allocated():
            gpu, mode = _parsed(each["device"])
            use[gpu].append((uid, mode))
            has = each.get("consumedCapacity", {})
            share = units(has.get("cores", "0")), units(has.get("memory", "0")) // GIB
            amounts[uid][gpu].append(share)
        self._amounts |= amounts  # of those that are free again, too: their containers may run
        for gpu, claims in use.items():
            if fault := self._too_much(gpu, dict(claims), len(claims)):
                return f"{gpu} is allocated {fault}"
        return None

    def _too_much(self, gpu: str, claims: Mapping[str, Mode], devices: int = 0) -> str:
        """The fault of a set of claims on one GPU, in words; empty: there is none."""
        modes = set(claims.values())
        if len(modes) > 1:
            return f"in two modes, to {sorted(claims)}"
        if modes == {WHOLE_GPUS} and max(devices, len(claims)) > 1:
            return f"twice, to {sorted(claims)}"
        shares = [each for uid in claims for each in self._amounts.get(uid, {}).get(gpu, ())]
        cores, gib = sum(cores for cores, _ in shares), sum(gib for _, gib in shares)
        most = (self._world.machine.gpu(0).memory_total >> 30) - 1  # all GPUs are alike
        return f"{cores} cores and {gib} GiB" if cores > 100 or gib > most else ""

    def _deleted(self, method: str, path: str, body: object) -> None:
        del body
        if method != "DELETE":
            return
        allocated = {each["device"] for _, each in self._allocated()}
        for item in self._world.kubelet.api.resources.of(SLICES):
            if path.endswith(f"/{item['metadata']['name']}"):
                devices = {each["name"] for each in item["spec"].get("devices", ())}
                for name in sorted(devices & allocated):
                    self._taken = f"device {name} is allocated, and has left the list with its slice"

    def _unlisted(self) -> str | None:
        """A device that is allocated never leaves the list, and its counter never changes.

        Where the slices were taken away, and the GPU has gone or the agent has begun since, nobody knows it.
        """
        listed = self._listed()
        if listed is None:
            return None
        allocated = {each["device"] for _, each in self._allocated()}
        for name in sorted(allocated):
            if name in self._counters and name not in listed:
                return f"device {name} is allocated, and has left the list"
            if name in listed and self._counters.setdefault(name, listed[name]) != listed[name]:
                return f"device {name} is allocated, and its counter has changed: {listed[name]}"
        self._counters = {name: each for name, each in self._counters.items() if name in allocated}
        return None

    def _listed(self) -> dict[str, object] | None:
        """Counters of the devices of the pool by name; None: it is not complete, or there is none."""
        node = self._world.kubelet.api.node_name
        items = [
            item["spec"]
            for item in self._world.kubelet.api.resources.of(SLICES)
            if item["spec"]["driver"] == DRIVER and item["spec"]["pool"]["name"] == pool_of(node)
        ]
        newest = max((each["pool"]["generation"] for each in items), default=0)
        specs = [each for each in items if each["pool"]["generation"] == newest]
        if not specs or len(specs) < specs[0]["pool"]["resourceSliceCount"]:
            self._counters.clear()  # taken away by somebody
            return None
        counters = {
            (each["name"], name): value
            for spec in specs
            for each in spec.get("sharedCounters", ())
            for name, value in each["counters"].items()
        }
        return {
            device["name"]: [
                (each["counterSet"], name, amount, counters.get((each["counterSet"], name)))
                for each in device["consumesCounters"]
                for name, amount in each["counters"].items()
            ]
            for spec in specs
            for device in spec.get("devices", ())
        }

    # By the kubelet's record, and what runs

    def _recorded(self) -> Claims | None:
        life = self._world.kubelet._life
        return None if life is None else {each.uid: each for each in life._claims._claims.values()}

    def _running(self, recorded: Claims) -> dict[str, dict[str, Mode]]:
        """By GPU the claims of containers that run, with their mode."""
        containers = self._world.kubelet._machine.containers
        alive = {uid for (uid, name) in containers.views if containers.running(uid, name)}
        found: dict[str, dict[str, Mode]] = defaultdict(dict)
        for info in recorded.values():
            if alive & info.pods:
                for each in info.drivers.get(DRIVER, ()):
                    gpu, mode = _parsed(each.device_name)
                    found[gpu][info.uid] = mode
        return found

    def _shared(self, held: Mapping[str, Mode]) -> str | None:
        """No GPU runs in two modes, or more than fits."""
        if (recorded := self._recorded()) is None:
            return None
        plugins = {uuid.lower(): mode for uuid, mode in held.items()}
        for gpu, claims in self._running(recorded).items():
            if fault := self._too_much(gpu, claims):
                return f"{gpu} runs {fault}"
            if gpu in plugins:
                return f"{gpu} is held as {plugins[gpu].value} by plugin, and runs claims {sorted(claims)}"
        return None

    # What may last for a while

    def _lasting(self) -> str | None:
        world, now = self._world, anyio.current_time()
        agent, current, recorded = world.running, world.current, self._recorded()
        if agent is None or current is None or recorded is None or agent.door is None:
            self._since.clear()
            return None
        if current.life.number != self._life or not world.kubelet_up.is_set():
            self._life = current.life.number
            self._since.clear()
        found = dict(self._now(recorded))
        self._since = {text: self._since.get(text, now) for text in found}
        late = [text for text, since in self._since.items() if now - since > found[text]]
        return late[0] if late else None

    def _now(self, recorded: Claims) -> Iterator[tuple[str, float]]:
        world = self._world
        agent = world.running
        assert agent is not None
        assert agent.door is not None
        known = agent.door.ledger.held.value
        ready = {uid for uid, each in recorded.items() if each.drivers.get(DRIVER) and not each.unpreparing}
        for uid in sorted(known.keys() - recorded.keys()):
            yield f"claim {uid} was given back, and the agent keeps it", SAME_SECONDS
        for uid in sorted(ready - known.keys()):
            yield f"claim {uid} is prepared, and the agent does not know it", SAME_SECONDS
        if world.nvml_faults or world.lost:
            return
        active = {one.uuid.lower(): one.active for one in agent.switcher.state.value.gpus}
        if not _record_is_there():
            # An agent that begins leaves alone what runs for a GPU, until the kubelet says who holds it.
            judged = {uuid.lower() for uuid in agent.switcher.assignment.value.gpus}
            active = {gpu: mode for gpu, mode in active.items() if gpu in judged}
        for gpu, claims in self._running(recorded).items():
            mode = next(iter(claims.values()))
            if gpu in active and active[gpu].mode is not mode:
                said = f"GPU {gpu} runs claims as {WORDS[mode]}, and is in mode {active[gpu].mode.value}"
                yield said, MODE_SECONDS


async def check_claims_settle(world: World) -> str | None:
    """Once faults have stopped: pods that got devices run, pods that were deleted go. The fault, in words."""
    if not world.shape.claims:
        return None
    before = {pod.uid for pod in _with_claims(world)}
    await anyio.sleep(STARTED_SECONDS)
    for pod in _with_claims(world):
        if pod.uid not in before:
            continue
        if pod.deleting and anyio.current_time() - pod.deleted_at > STARTED_SECONDS + pod.spec.grace:
            return f"pod {pod.spec.name} does not go: {pod.claims_fault}"
        if pod.node_name and pod.phase is Phase.PENDING and not pod.deleting and _may_run(world, pod):
            return f"pod {pod.spec.name} does not start: {pod.claims_fault}"
    return None


def _record_is_there() -> bool:
    """Whether PodResources answers, within what a new agent waits; its checkpoint is read first."""
    kubelet = seams.KUBELET
    return not kubelet.records and sum(kubelet.answering) + kubelet.reading < PATIENCE_SECONDS


def _with_claims(world: World) -> list[Pod]:
    return [pod for pod in world.kubelet.api.pods.values() if pod.spec.claims]


def _may_run(world: World, pod: Pod) -> bool:
    """Whether all its GPUs are well, and no other door's."""
    agent = world.running
    if agent is None:
        return False
    wanted = {one.uuid.lower(): one.wanted.dra for one in agent.switcher.state.value.gpus}
    healthy = {each.uuid.lower() for each in agent.core.inventory.snapshot.value.gpus if each.healthy}
    objects = world.kubelet.api.resources
    for name in pod.claims.values():
        for each in results(objects.get(CLAIMS, (pod.spec.namespace, name))):
            gpu, _ = _parsed(each["device"])
            if gpu not in healthy or not wanted.get(gpu):
                return False
    return True


def _parsed(device: str) -> tuple[str, Mode]:
    found = parse_device(device)
    assert found is not None, device
    return found
