"""An agent whose kubelet and API server say what a figure prepared: their time is not the agent's."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import grpc

from agent._proto import v1
from agent.simulator.kubelet.api_server import Api
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.machine import SimulatedMachine
from tests.bench.agent import BenchAgent
from tests.bench.conditions import Conditions, short_folder

# The watch shows a pod 8 to 300 ms before the kubelet asks (seen on 1.36): its event is no part of the call.
SHOWN_SECONDS = 0.02


class PreparedRecords:
    """PodResources as a server of its own that answers prepared bytes: its time is not the agent's."""

    def __init__(self, standing: bytes) -> None:
        self._standing = standing
        self.newest = b""
        self.lists = 0  # that were asked for

    @contextmanager
    def serving(self, socket: Path) -> Iterator[None]:
        """Serve on a unix socket."""
        socket.parent.mkdir(parents=True, exist_ok=True)

        def listed(_request: object, _context: object) -> bytes:
            self.lists += 1
            return self._standing + self.newest

        handler = grpc.unary_unary_rpc_method_handler(listed)
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler})]
        )
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield
        finally:
            server.stop(0).wait()


def entry(name: str, ids: Mapping[str, Sequence[str]]) -> bytes:
    """One pod with a container `main`, one entry per device ID as the kubelet sends them."""
    devices = [
        v1.ContainerDevices(resource_name=resource, device_ids=[each])
        for resource, held in ids.items()
        for each in held
    ]
    pod = v1.PodResources(
        name=name, namespace="default", containers=[v1.ContainerResources(name="main", devices=devices)]
    )
    return bytes(v1.ListPodResourcesResponse(pod_resources=[pod]))


@asynccontextmanager
async def agent_between(
    conditions: Conditions, folder: Path, mode: str, api: Api, records: PreparedRecords
) -> AsyncIterator[BenchAgent]:
    """An agent that follows the pods of `api` and reads `records`; the bench is its kubelet."""
    for name in ("cdi", "k/plugins_registry", "k/device-plugins"):
        (folder / name).mkdir(parents=True)
    with records.serving(folder / "k" / "pod-resources" / "kubelet.sock"):
        async with HttpApi(api).serving() as http:
            http.write_kubeconfig(folder / "kubeconfig")
            settings = conditions.settings(folder) | {
                "defaultMode": mode,
                "cluster.access": "required",
                "cluster.kubeconfig": str(folder / "kubeconfig"),
                "cluster.nodeName": "bench",
            }
            agent = BenchAgent(conditions.process(folder), settings)
            await agent.start()
            try:
                yield agent
            finally:
                await agent.kill()


async def simulated_machine() -> tuple[Path, SimulatedMachine]:
    """A DGX H200 in a folder of its own."""
    folder = await anyio.to_thread.run_sync(short_folder)
    machine = await anyio.to_thread.run_sync(SimulatedMachine.create, "dgx-h200", folder / "machine")
    await anyio.to_thread.run_sync(machine.write_sysfs, folder / "sys")
    return folder, machine


async def served(folder: Path, *resources: str) -> list[Path]:
    """The sockets of resources, once they are there."""
    sockets = [folder / "k/plugins_registry" / f"gna-{name}.sock" for name in resources]
    with anyio.fail_after(20):
        while not all(socket.exists() for socket in sockets):
            await anyio.sleep(0.05)
    return sockets
