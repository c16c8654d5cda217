"""Processes that outlive a deletion by force: nothing of their GPU is offered while they are there."""

import shutil

import anyio

from agent.app.agent import Agent
from agent.model.modes import SEPARATOR, Mode, Offering
from agent.mps.wing import MpsWing
from agent.vgpu.wing import VgpuWing
from tests.storm.excuses import Excuses
from tests.storm.lives import AgentRun
from tests.storm.world import World

# After the record of holders names the pod no more. NVML is asked at once, and the list follows.
OFFERED_SECONDS = 3.0
FIRST_PID = 1 << 22  # no daemon's nor client's


def outlive(world: World, slot: int, uid: str, container_id: str) -> int:
    """A process of a pod's hangs on a GPU from now on."""
    pid = FIRST_PID + len(world.outliving) + world.made
    while pid in world.outliving:
        pid += 1
    folder = world.folder / "proc" / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text(f"0::/kubepods/pod{uid}/{container_id}\n")
    (folder / "comm").write_text("python\n")
    world.machine.processes.start(slot, pid)
    world.outliving[pid] = slot, world.machine.uuid(slot), uid, anyio.current_time()
    return pid


def end(world: World, pid: int) -> None:
    """It ends."""
    if world.outliving.pop(pid, None) is not None:
        world.machine.processes.stop(pid)
        shutil.rmtree(world.folder / "proc" / str(pid))


class Lingerers:
    """GPUs that are offered beside such a process, and since when."""

    def __init__(self, world: World, excuses: Excuses) -> None:
        self._world = world
        self._excuses = excuses
        self._since: dict[int, float] = {}
        # UIDs of pods that the record, or the watch, of the agent that runs has shown.
        self._recorded: set[str] = set()
        self._watched: set[str] = set()
        self._life = 0

    def offered(self) -> str | None:
        """The fault, in words."""
        world, now = self._world, anyio.current_time()
        agent, current, life = world.running, world.current, world.kubelet._life
        if agent is not None and current is not None:
            self._note(agent, current)
        if not world.outliving or agent is None or current is None or life is None:
            self._since.clear()
            return None
        watched = agent.cluster.pods.reflector.items.value if agent.cluster else {}
        holders = agent.core.holdings.gpus_by_pod()
        listed = {
            text.partition(SEPARATOR)[0] for ids in life.devices.tables.healthy.values() for text in ids
        }
        found: dict[int, str] = {}
        for pid, (_, uuid, uid, began) in world.outliving.items():
            if current.life.dead or not (current.began < began or self._recalls(agent, current, uid)):
                continue
            # A pod that came and went while watch and record were mute is nobody's to know.
            let_go = uid in self._recorded or (uid in self._watched and uid not in watched)
            if current.began < began and not let_go:
                continue
            if uuid in _begun(agent):
                continue  # who has one member of a share there gets the other
            if self._is_closed(agent, uuid):
                continue
            if uuid in listed and uid not in holders and self._excuses.sees(uuid):
                found[pid] = f"{uuid} is offered, and process {pid} of pod {uid}, which has ended, is on it"
        self._since = {pid: self._since.get(pid, now) for pid in found}
        late = [text for pid, text in found.items() if now - self._since[pid] > OFFERED_SECONDS]
        return late[0] if late else None

    def _is_closed(self, agent: Agent, uuid: str) -> bool:
        """Whether nobody gets anything of a GPU whose list stays as it is, until it is read who holds what.

        Of what a kubelet has chosen and not recorded yet nothing may leave the list, or that kubelet ends.
        """
        offering = agent.switcher.assignment.value.of(uuid).offering
        return offering is Offering.CLOSING and self._excuses.records_are_away()

    def _note(self, agent: Agent, current: AgentRun) -> None:
        if current.life.number != self._life:
            self._life = current.life.number
            self._recorded.clear()
            self._watched.clear()
        self._recorded.update(agent.core.holdings._record.pods)
        self._watched.update(agent.cluster.pods.reflector.items.value if agent.cluster else ())

    def _recalls(self, agent: Agent, current: AgentRun, uid: str) -> bool:
        """Whether an agent that has begun since can know: it looks once, as soon as it knows all pods."""
        known, may_live = agent.core.holdings.known_pods(), agent.core.holdings.may_be_static
        return known is not None and uid not in known and not may_live(uid)


def _begun(agent: Agent) -> frozenset[str]:
    """GPUs of shares of which the kubelet was given one member."""
    vgpu, mps = agent.wings.get(Mode.VGPU), agent.wings.get(Mode.MPS)
    pairings = [vgpu._shares.pairing] if isinstance(vgpu, VgpuWing) else []
    pairings += [mps._conditions.pairing] if isinstance(mps, MpsWing) else []
    open_ones = (each for one in pairings for each in one.ledger.reservations if not each.complete)
    return frozenset(gpu for each in open_ones if each.granted for gpu in each.gpus)
