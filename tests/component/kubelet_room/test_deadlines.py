"""A kubelet that takes a call and never answers: the deadline ends the call, and nothing else."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from agent.kubelet.podresources import PodResources, PodResourcesUnavailable

CALLS = 40


@contextmanager
def hanging_kubelet() -> Iterator[Path]:
    """A root folder whose PodResources take every call and answer none."""
    let_go = threading.Event()

    def hang(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        let_go.wait(30)
        return b""

    with tempfile.TemporaryDirectory(prefix="gna-") as folder:
        socket = Path(folder) / "pod-resources" / "kubelet.sock"
        socket.parent.mkdir()
        server = grpc.server(ThreadPoolExecutor(CALLS))
        handler = grpc.unary_unary_rpc_method_handler(hang)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})]
        )
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield Path(folder)
        finally:
            let_go.set()
            server.stop(None).wait()


async def test_a_hanging_kubelet_costs_the_deadline_and_cancels_nobody() -> None:
    # grpclib's own timeouts cancel the task and never take that back. One that fell together with the
    # deadline of a scope ended the agent's mode switcher, and with it the agent, in silence.
    with hanging_kubelet() as root:
        lister = PodResources(root)
        task = asyncio.current_task()
        assert task is not None
        for _ in range(CALLS):
            with pytest.raises(PodResourcesUnavailable, match="no answer"):
                await lister.list(0.05)
            assert task.cancelling() == 0
