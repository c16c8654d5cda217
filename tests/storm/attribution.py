"""Who asked by the agent's word is whom the kubelet was admitting, and limits stay where they are used."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.model.holding import Holder, PairMember
from agent.pairing.pair_rules import Grant
from agent.pairing.pairing import Pairing
from agent.pairing.resolver import resource_of
from agent.simulator.kubelet.devices import DeviceManager
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.storm import seams
from tests.storm.holders import OURS
from tests.storm.world import World


def observe(world: World, found: Callable[[str], None]) -> Callable[[], None]:
    """Call `found` with each share that was granted as another container's; the answer ends it."""
    allocate, grant = DeviceManager.allocate, Pairing.allocate
    asking: list[tuple[str, str]] = []  # pod UID and container of those that the kubelet serves now
    names: dict[str, str] = {}  # of their pods, by UID
    # Containers that run and whose devices the kubelet has forgotten, and init containers that were through
    # before it knew of the resource: it does not ask for these, and nobody says so; the next one of the pod
    # that asks for as much may be either.
    lost: set[tuple[str, str]] = set()
    shares: dict[tuple[str, str], dict[str, int]] = {}

    async def serving(
        self: DeviceManager, pod: PodSpec, uid: str, container: ContainerSpec, running: bool
    ) -> None:
        asking.append((uid, container.name))
        before = itertools.takewhile(lambda each: each is not container, pod.init_containers)
        for each in (*before, container):
            shares[uid, each.name] = {of: n for of, n in each.limits.items() if of in OURS}
            through = running or each is not container
            if through and not self.tables.pods.of_container(uid, each.name):
                lost.add((uid, each.name))
        names[uid] = "/".join(pod.key)
        try:
            await allocate(self, pod, uid, container, running)
        finally:
            asking.remove((uid, container.name))

    async def granted(self: Pairing, member: PairMember, ids: Sequence[str]) -> Grant:
        before, resource = tuple(asking), resource_of(self.pair, member)
        answer = await grant(self, member, ids)
        life = seams.LIFE.get()
        known = {*before, *asking}
        # A copy that waits is believed while the API server says nothing, known or not: a successor of its
        # name is then not to be known from it. Limits stay by the name, and the container is the right one.
        mute = "pods" in world.http.silent or not self._resolver._source.current()
        believed = answer.pod.status.phase == "Pending" and mute
        named_so = {(names[uid], container) for uid, container in known}
        if believed and ("/".join(answer.pod.key), answer.container) in named_so:
            return answer
        # Nobody can see a static pod in admission without a record: it has no mirror yet.
        api, holder = world.kubelet.api, Holder(*answer.pod.key, answer.container)
        unseen = {"/".join(key) for key in api.manifests.keys() - api.pods.keys()}
        reserved = self.ledger.reservation(holder)
        if reserved and reserved.blind and not unseen.isdisjoint(names[uid] for uid, _ in known):
            return answer
        by_agent = answer.pod.uid, answer.container
        if by_agent in lost and any(
            each[0] == by_agent[0] and shares[each].get(resource) == shares[by_agent].get(resource)
            for each in known
        ):
            return answer
        if known and by_agent not in known and not (life and life.dead):
            named = f"{answer.pod.namespace}/{answer.pod.name} ({answer.pod.uid}), {answer.container}"
            wanted = sorted(f"{names[uid]} ({uid}), {container}" for uid, container in known)
            found(f"{member.value} was granted to {named}; the kubelet asked for {'; '.join(wanted)}")
        return answer

    DeviceManager.allocate = serving  # type: ignore[method-assign]
    Pairing.allocate = granted  # type: ignore[method-assign]

    def end() -> None:
        DeviceManager.allocate = allocate  # type: ignore[method-assign]
        Pairing.allocate = grant  # type: ignore[method-assign]

    return end


class Limits:
    """Containers that run and whose limits were removed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def gone(self) -> str | None:
        """The fault, in words."""
        world = self._world
        if not world.shape.resize:
            return None
        run = str(world.folder / "run")
        # A kubelet that has not heard of a deletion by force runs containers on.
        life = world.kubelet._life
        known = (*world.kubelet.api.pods.values(), *(life._pods.values() if life else ()))
        pods = {pod.uid for pod in known if not pod.phase.finished}
        containers = world.kubelet._machine.containers
        for (uid, name), view in containers.views.items():
            if uid in pods and containers.running(uid, name):
                gone = [
                    each for each in view.mounts.values() if each.startswith(run) and not Path(each).exists()
                ]
                if gone:
                    return f"container {name} of pod {uid} runs, and its {gone[0]} was removed"
        return None
