"""The agent's knowledge of the API server's objects, and its handling of a server that refuses."""

from collections import deque

import anyio

from agent.modes.desired import LABEL
from tests.storm.world import World

# In which a watch that is mute is noticed, and opened again (`agent.cluster.reflector`, SILENCE_SECONDS).
VIEW_SECONDS = 100.0
# The same write, refused so often within so long: nobody waited in between. Two may try at once, each of them
# every 0.2 s for 5 s at most: a switch, and an agent that stops meanwhile (`agent.node.withdrawal`).
TRIES, TRIES_SECONDS = 5, 0.3


class Views:
    """Changes that the agent has not seen, and since when; writes that were refused."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[str, float] = {}
        self._life = 0
        self._unanswered = 0.0
        self._refused: dict[str, deque[float]] = {}
        self.found: list[str] = []
        world.on_refused.append(self._count)

    def outdated(self) -> str | None:
        """The faults, in words."""
        world, now = self._world, anyio.current_time()
        agent, current = world.running, world.current
        if agent is None or agent.cluster is None or current is None or not world.api_well:
            self._since.clear()
            return None
        if current.life.number != self._life:
            self._life = current.life.number
            self._since.clear()
        if world.unanswered != self._unanswered:  # calls had no answer for long, between two looks
            self._unanswered = world.unanswered
            self._since.clear()
        there = {pod.api_uid for pod in world.kubelet.api.pods.values() if pod.node_name}
        known = agent.cluster.pods.reflector.items.value.keys()
        node = agent.cluster.node.value
        seen = node.metadata.labels.get(LABEL) if node else None
        wrong = {f"pod {uid} is unknown to the agent" for uid in there - known}
        wrong |= {f"pod {uid} is gone, and the agent knows it" for uid in known - there}
        if (word := world.http.labels.get(LABEL)) != seen:
            wrong.add(f"the node's label is {word}, to the agent it is {seen}")
        self._since = {each: self._since.get(each, now) for each in wrong}
        late = sorted(each for each, since in self._since.items() if now - since > VIEW_SECONDS)
        return f"for {VIEW_SECONDS:g} s {late[0]}" if late else None

    def _count(self, method: str, path: str, body: object) -> None:
        times = self._refused.setdefault(f"{method} {path} {body}", deque(maxlen=TRIES))
        times.append(anyio.current_time())
        if len(times) == TRIES and times[-1] - times[0] < TRIES_SECONDS:
            self.found.append(
                f"{method} {path} was tried {TRIES} times within {TRIES_SECONDS:g} s, and refused"
            )
