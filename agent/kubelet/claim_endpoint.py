"""The life of the DRA driver's socket: in plugins_registry, where the kubelet finds it and calls it too."""

from pathlib import Path

import anyio
import structlog

from agent.kit.tasks import Backoff
from agent.kubelet.claim_service import ClaimDriver, ClaimService
from agent.kubelet.grpc_server import DrainableServer

log = structlog.get_logger()

LOOK_SECONDS = 1.0  # the kubelet looks as often
SOCKET = "gna-dra.sock"


class ClaimEndpoint:
    """Keeps a driver registered for as long as `run` runs. A kubelet that restarts asks again by itself."""

    def __init__(self, driver: ClaimDriver, kubelet_root: Path) -> None:
        self.service = ClaimService(driver)
        self.path = kubelet_root / "plugins_registry" / SOCKET

    @property
    def blocker(self) -> str | None:
        """Why it is not registered, in words; None: it is."""
        if self.service.registered.value:
            return None
        return f"the DRA driver is not registered with the kubelet: {self.service.problem}"

    async def run(self) -> None:
        """Serve until cancelled; then end streams and remove the socket."""
        backoff = Backoff(first=0.1, longest=30.0)
        while True:
            self.service.resume()
            server = DrainableServer(self.service.handlers(), self.path)
            try:
                await server.start()
                backoff.reset()
                while await server.in_place():
                    await anyio.sleep(LOOK_SECONDS)
                log.warning("socket_gone", socket=str(self.path))
            except OSError as error:
                problem = f"{self.path}: {error.strerror or error}; is the kubelet running?"
                if problem != self.service.problem:
                    log.warning("registration_waits", driver=self.path.name, obstacle=problem)
                self.service.problem = problem
            finally:
                self.service.drain()
                await server.stop()
            await anyio.sleep(backoff.next())
