"""Devices on which containers run and of which their kubelet knows nothing, as it lost its checkpoint.

An agent that knew of them keeps them from everybody else; one that has begun since cannot know of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from agent.app.agent import Agent
from agent.simulator.kubelet import EmbeddedKubelet
from agent.simulator.kubelet.device_tables import Allocation
from agent.simulator.kubelet.pod_specs import Phase

Place = tuple[str, str, str]  # pod UID, container, resource
Entry = tuple[str, str, str, Allocation]


@dataclass
class LostDevices:
    """All that a kubelet has known and the next one did not, until it is written down again."""

    kubelet: EmbeddedKubelet
    _known: dict[Place, Allocation] = field(default_factory=dict)  # to the kubelet that stops
    _kept: dict[Place, int] = field(default_factory=dict)  # the life of the agent that knew it
    _lost: dict[Place, Allocation] = field(default_factory=dict)

    def stopping(self, agent: Agent | None, life: int) -> None:
        """The kubelet is about to stop. `agent` runs in that life."""
        held = {(uid, place[0], place[1]): ids for uid, place, ids in _recorded(agent)}
        for *place, allocation in self._entries():
            key = (place[0], place[1], place[2])
            self._known[key] = allocation
            if held.get(key) == allocation.ids:
                self._kept[key] = life

    def started(self) -> None:
        """The next one has read its checkpoint, or there was none."""
        written = {(uid, container, resource) for uid, container, resource, _ in self._entries()}
        self._lost |= {place: each for place, each in self._known.items() if place not in written}
        self._known.clear()

    def rebooted(self) -> None:
        """No container runs any more."""
        self._known.clear()
        self._lost.clear()

    def entries(self) -> Iterator[Entry]:
        """All that is lost now, of pods that have not ended."""
        if not self._lost:
            return
        alive = unfinished(self.kubelet)
        written = {(uid, container, resource) for uid, container, resource, _ in self._entries()}
        for place in [each for each in self._lost if each in written or each[0] not in alive]:
            del self._lost[place]
            self._kept.pop(place, None)
        for (uid, container, resource), allocation in self._lost.items():
            yield uid, container, resource, allocation

    def given_up(self, agent: Agent, life: int) -> str | None:
        """The fault, in words: an agent has known of such devices, and keeps them no more."""
        lost = list(self.entries())
        if not lost:
            return None
        # Plain init containers of a pod that runs are over.
        running = {
            (pod.uid, each.name)
            for pod in self.kubelet.api.pods.values()
            if pod.phase is Phase.RUNNING
            for each in (*pod.spec.init_containers, *pod.spec.containers)
            if each.restartable or each in pod.spec.containers
        }
        held = {(uid, *place): ids for uid, place, ids in _recorded(agent)}
        for uid, container, resource, allocation in lost:
            place = (uid, container, resource)
            known = self._kept.get(place) == life and (uid, container) in running
            if known and not allocation.ids <= held.get(place, frozenset()):
                return f"container {container} of pod {uid} runs on {min(allocation.ids)}, which nobody holds"
        return None

    def _entries(self) -> Iterator[Entry]:
        life = self.kubelet._life
        yield from life.devices.tables.pods.entries() if life else ()


def unfinished(kubelet: EmbeddedKubelet) -> set[str]:
    """UIDs of pods that have not finished; of those deleted by force, while the kubelet has them."""
    api, life = kubelet.api, kubelet._life
    known = (api.pods.values(), api.manifests.values(), life._pods.values() if life else ())
    return {pod.uid for pods in known for pod in pods if not pod.phase.finished}


def _recorded(agent: Agent | None) -> Iterator[tuple[str, tuple[str, str], frozenset[str]]]:
    """UID, container with resource, and IDs of what pods hold that the agent's watch has shown."""
    if agent is None:
        return
    shown = agent.core.holdings.view().pods
    for uid, pod in agent.core.holdings._record.pods.items():
        if uid in shown:
            for place, each in pod.holdings.items():
                yield uid, place, each.id_set
