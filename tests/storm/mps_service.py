"""MPS daemons: nothing is offered without one, one that hangs is replaced, and none outlives its mode."""

import anyio

from agent.model.modes import SEPARATOR, Mode
from agent.model.pod import MPS
from tests.storm.world import World

DEAD_SECONDS = 15.0  # that units may be offered whose daemon is dead
HUNG_SECONDS = 45.0  # or hangs: a probe comes every 5 s, and has deadlines of its own
REPLACED_SECONDS = 100.0  # until one that hangs is ended, or another started: `agent.mps.probing` waits 60 s
LEFT_SECONDS = 90.0  # until a daemon is gone whose GPU is in another mode


class MpsService:
    """Faults of daemons, and since when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[tuple[str, float], float] = {}
        self._life = 0

    def wrong(self) -> str | None:
        """The faults, in words."""
        now, world = anyio.current_time(), self._world
        agent, current = world.running, world.current
        away = world.nvml_faults or world.lost or not world.kubelet_up.is_set()
        if not world.shape.mps or agent is None or current is None or away:
            self._since.clear()
            return None
        if current.life.number != self._life:
            self._life = current.life.number
            self._since.clear()
        found = {
            (text, seconds): None
            for one in agent.switcher.state.value.gpus
            for text, seconds in self._of_gpu(one.uuid, one.active.mode)
        }
        self._since = {each: self._since.get(each, now) for each in found}
        late = [text for (text, seconds), since in self._since.items() if now - since > seconds]
        return late[0] if late else None

    def _of_gpu(self, uuid: str, mode: Mode) -> list[tuple[str, float]]:
        world, life = self._world, self._world.kubelet._life
        pipe = world.folder / "run" / "mps" / uuid / "pipe"
        daemons = [each for each in world.daemons.on(pipe) if not each.forged]
        hung = [each for each in daemons if each.hangs]
        if mode is not Mode.MPS:
            left = [each for each in daemons if not each.hangs]
            name = f"GPU {uuid} is in mode {mode.value} and has MPS daemon"
            return [(f"{name} {each.process.pid}", LEFT_SECONDS) for each in left if mode is not Mode.OFF]
        # One that hangs before it has named its clients to this agent is let be: pods may live by its server.
        began = world.current.began if world.current else 0.0
        # So is one whose GPU is unplugged, of which the driver names no users.
        gone = uuid not in world.machine.uuids
        found = [
            (f"MPS daemon {each.process.pid} of GPU {uuid} hangs and is not replaced", REPLACED_SECONDS)
            for each in hung
            if not gone and (each.server is None or each.named > began)
        ]
        healthy = life.devices.tables.healthy.get(MPS.core, set()) if life else set()
        offered = any(each.partition(SEPARATOR)[0] == uuid for each in healthy)
        if not daemons and not world.daemons.refuses:
            found.append((f"GPU {uuid} in mode mps has no MPS daemon", REPLACED_SECONDS))
        if offered and not daemons:
            found.append((f"GPU {uuid} has no MPS daemon, and shares of it are offered", DEAD_SECONDS))
        if offered and hung and len(hung) == len(daemons):
            found.append((f"GPU {uuid} has an MPS daemon that hangs, and shares are offered", HUNG_SECONDS))
        return found
