"""/healthz and /readyz. The first is about the process, the second about what the node can serve.

A liveness probe that also asked for the GPUs would make the kubelet restart a good agent on a bad node,
so /healthz looks at nothing but the loop (it answers at all) and the tasks that must not end.
"""

from collections.abc import Callable, Sequence

from agent.kit.supervise import Supervisor, TaskState
from agent.web.server import HttpServer, Reply, Request


class Probes:
    """Answers the kubelet's probes. `blockers` gives, each in a sentence, why the node cannot serve."""

    def __init__(
        self,
        supervisor: Supervisor,
        blockers: Callable[[], Sequence[str]],
        remarks: Callable[[], Sequence[str]] = list,
    ) -> None:
        """`remarks`: what works less well than it should, though pods are served."""
        self._supervisor = supervisor
        self._blockers = blockers
        self._remarks = remarks

    def add_to(self, server: HttpServer) -> None:
        """Take both routes."""
        server.add_probe("/healthz", self.health)
        server.add_probe("/readyz", self.ready)

    async def health(self, _: Request) -> Reply:
        """200 while every fatal task runs, else 503. Tasks that are restarted are told, and do no harm."""
        down = [state for state in self._supervisor.states.values() if not state.running]
        dead = [state for state in down if state.fatal]
        lines = ["unhealthy" if dead else "ok", *(_told(state) for state in down)]
        return Reply.text("\n".join(lines), 503 if dead else 200)

    async def ready(self, _: Request) -> Reply:
        """200 when nothing stands in the way of serving pods, else 503 with every reason on its own line.

        The first line of a 200 is `ready`; remarks follow, one a line.
        """
        blockers = self._blockers()
        if not blockers:
            return Reply.text("\n".join(["ready", *(" ".join(each.split()) for each in self._remarks())]))
        return Reply.text("\n".join(" ".join(blocker.split()) for blocker in blockers), 503)


def _told(state: TaskState) -> str:
    problem = " ".join((state.last_error or "no reason known").split())
    if state.fatal:
        return f"task {state.name} ended: {problem}"
    return f"task {state.name} waits for its next try (restarts: {state.restarts}): {problem}"
