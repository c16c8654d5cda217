"""/healthz is about the process, /readyz about the node's service, /readyz/agent about the agent's part.

A liveness probe that also asked for the GPUs would make the kubelet restart a good agent on a bad node,
so /healthz looks at nothing but the loop (it answers at all) and the tasks that must not end. A readiness
probe that asked for them would let one node without a driver hold up a rolling update of all the others, so
it asks /readyz/agent.

Every caller that reaches the port may ask, and pods belong to many tenants: no answer names one.
"""

from collections.abc import Callable, Sequence

from agent.kit.tasks import Supervisor, TaskState
from agent.model.pod import without_pods
from agent.web.server import HttpRequest, HttpServer, Reply


class Probes:
    """Answers the kubelet's probes. `blockers` gives, each in a sentence, why the node cannot serve."""

    def __init__(
        self,
        supervisor: Supervisor,
        blockers: Callable[[], Sequence[str]],
        remarks: Callable[[], Sequence[str]] = list,
        shortcomings: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """`remarks`: degradations, though pods are served.

        `shortcomings`: those blockers that are the agent's own and not the node's; None: all are.
        """
        self._supervisor = supervisor
        self._blockers = blockers
        self._remarks = remarks
        self._shortcomings = shortcomings or blockers

    def add_to(self, server: HttpServer) -> None:
        server.add_probe("/healthz", self.health)
        server.add_probe("/readyz", self.ready)
        server.add_probe("/readyz/agent", self.agent_ready)

    async def health(self, _: HttpRequest) -> Reply:
        """200 while every fatal task runs, else 503. Tasks that are restarted are listed, and do no harm."""
        down = [state for state in self._supervisor.states.values() if not state.running]
        dead = [state for state in down if state.fatal]
        lines = ["unhealthy" if dead else "ok", *(_line(state) for state in down)]
        return Reply.text("\n".join(lines), 503 if dead else 200)

    async def ready(self, _: HttpRequest) -> Reply:
        """200 when nothing stands in the way of serving pods, else 503 with every reason on its own line.

        The first line of a 200 is `ready`; remarks follow, one a line.
        """
        return _answer(self._blockers(), self._remarks)

    async def agent_ready(self, _: HttpRequest) -> Reply:
        """The same of the agent alone: other blockers of the node follow `ready`."""
        return _answer(self._shortcomings(), self._blockers)


def _answer(blockers: Sequence[str], remarks: Callable[[], Sequence[str]]) -> Reply:
    lines = blockers or ["ready", *remarks()]
    return Reply.text("\n".join(map(without_pods, lines)), 503 if blockers else 200)


def _line(state: TaskState) -> str:
    problem = without_pods(state.last_error or "no reason known")
    if state.fatal:
        return f"task {state.name} ended: {problem}"
    return f"task {state.name} waits for its next try (restarts: {state.restarts}): {problem}"
