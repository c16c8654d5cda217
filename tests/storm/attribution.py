"""Who asked by the agent's word is whom the kubelet was admitting, and limits stay where they are used."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from agent.model.ledger import PairMember
from agent.pairing.pair_rules import Grant
from agent.pairing.pairing import Pairing
from agent.simulator.kubelet.devices import DeviceManager
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.storm import seams
from tests.storm.world import World

# Until a reading says that a pod lives on of which the API server knows no more.
PUT_BACK_SECONDS = 6.0


def observe(found: Callable[[str], None]) -> Callable[[], None]:
    """Call `found` with each share that was granted as another container's; the answer ends it."""
    allocate, grant = DeviceManager.allocate, Pairing.allocate
    asking: list[tuple[str, str]] = []  # pod UID and container of those that the kubelet serves now

    async def serving(
        self: DeviceManager, pod: PodSpec, uid: str, container: ContainerSpec, running: bool
    ) -> None:
        asking.append((uid, container.name))
        try:
            await allocate(self, pod, uid, container, running)
        finally:
            asking.remove((uid, container.name))

    async def granted(self: Pairing, member: PairMember, ids: Sequence[str]) -> Grant:
        before = tuple(asking)
        answer = await grant(self, member, ids)
        life = seams.LIFE.get()
        known = {*before, *asking}
        if known and (answer.pod.uid, answer.container) not in known and not (life and life.dead):
            named = f"{answer.pod.namespace}/{answer.pod.name} ({answer.pod.uid}), {answer.container}"
            found(f"{member.value} was granted to {named}; the kubelet asked for {sorted(known)}")
        return answer

    DeviceManager.allocate = serving  # type: ignore[method-assign]
    Pairing.allocate = granted  # type: ignore[method-assign]

    def end() -> None:
        DeviceManager.allocate = allocate  # type: ignore[method-assign]
        Pairing.allocate = grant  # type: ignore[method-assign]

    return end


class Limits:
    """Containers that run and whose limits were removed, and since when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[str, float] = {}

    def gone(self) -> str | None:
        """The fault, in words."""
        world, now = self._world, anyio.current_time()
        if not world.shape.resize:
            return None
        life, run = world.kubelet._life, str(world.folder / "run")
        by_api = {pod.uid for pod in world.kubelet.api.pods.values() if not pod.phase.finished}
        # Those that were deleted by force run on for a while, and the kubelet lists them.
        listed = life._pods.values() if life else ()
        known = by_api | {pod.uid for pod in listed if not pod.phase.finished}
        containers, found = world.kubelet._machine.containers, {}
        for (uid, name), view in containers.views.items():
            if uid in known and containers.running(uid, name):
                gone = [
                    each for each in view.mounts.values() if each.startswith(run) and not Path(each).exists()
                ]
                for each in gone:
                    since = found[each] = self._since.get(each, now)
                    if now - since >= (0.0 if uid in by_api else PUT_BACK_SECONDS):
                        return f"container {name} of pod {uid} runs, and its {each} was removed"
        self._since = found
        return None
