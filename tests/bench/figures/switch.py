"""Switching modes: from the request to the kubelet's end of the sockets, and to a pod that runs."""

import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import grpc

from agent.simulator.kubelet.pod_specs import Phase
from tests.bench.conditions import Conditions, Node
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.cluster.build import build_parts
from tests.cluster.options import Options
from tests.cluster.real_rig import real_rig
from tests.cluster.rig import Cluster
from tests.component.protos import load
from tests.mps_binaries import SUITES, control_program
from tests.scenarios.mode_node import COUNTED, mode_node, pod_of

SWITCHES = 40  # each is followed by a pause of SPACING_SECONDS: the whole takes 45 s
MPS_SWITCHES = 10
LABELS = 20
IDLE_SECONDS = 5.0
SPACING_SECONDS = 1.05  # the agent takes a second request within a second for a flapping one
DEADLINE_SECONDS = 30.0
PRODUCTION_TICK_SECONDS = 10.0
RESOURCES = {
    "pgpu": ("nvidia.com/gpu",),
    "vgpu": ("tencent.com/vcuda-core", "tencent.com/vcuda-memory"),
    "mps": ("nvidia.com/mps-core", "nvidia.com/mps-memory"),
}
HEALTHY, UNHEALTHY = b"\x12\x07Healthy", b"\x12\tUnhealthy"


class Listener:
    """Holds ListAndWatch of resources open, as the kubelet does, and knows when which list came."""

    def __init__(self) -> None:
        self.ended = 0
        self._news = threading.Condition()
        self._lists: dict[str, bytes] = {}
        self._closing = False

    def follow(self, socket: Path, resource: str, stack: ExitStack) -> None:
        """Read a resource's lists in a thread until the end."""
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{socket}"))
        watch = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")
        stream = watch(b"", wait_for_ready=True)

        def read() -> None:
            try:
                for message in stream:
                    with self._news:
                        self._lists[resource] = message
                        self._news.notify_all()
            except grpc.RpcError:
                pass
            if not self._closing:
                self.ended += 1

        thread = threading.Thread(target=read, name=f"lists of {resource}")
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(stream.cancel)  # first, for the thread reads until then

    def closing(self) -> None:
        """Streams end from now on because this side wants it."""
        self._closing = True

    def wait(self, mode: str) -> float:
        """The time at which the lists were those of `mode` everywhere. Raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(lambda: self._shows(mode), DEADLINE_SECONDS):
                raise TimeoutError(f"no lists of mode {mode} within {DEADLINE_SECONDS:g} s")
            return time.perf_counter()

    def _shows(self, mode: str) -> bool:
        for resource, message in self._lists.items():
            if resource not in RESOURCES[mode] and message:
                return False
            if resource in RESOURCES[mode] and (HEALTHY not in message or UNHEALTHY in message):
                return False
        return all(resource in self._lists for resource in RESOURCES[mode])


@contextmanager
def pod_resources(socket: Path) -> Iterator[None]:
    """PodResources of a kubelet without pods, on the C core. Blocks at its end."""
    api = load("podresources")
    empty = api.ListPodResourcesResponse().SerializeToString()
    answer = grpc.unary_unary_rpc_method_handler(lambda _request, _context: empty)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": answer})]
    )
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


async def _switches(node: Node, modes: Sequence[str], count: int) -> tuple[list[float], int]:
    """Milliseconds of switches to the first of `modes` from the others, and how many streams ended."""
    file = node.folder / "mode"
    taken: list[float] = []

    def switch(mode: str, listener: Listener) -> float:
        began = time.perf_counter()
        file.write_text(mode)
        return (listener.wait(mode) - began) * 1000

    listener = Listener()
    with ExitStack() as stack:
        for mode in modes:  # the first use of a mode makes its sockets
            await anyio.to_thread.run_sync(file.write_text, mode)
            for resource in RESOURCES[mode]:
                with anyio.fail_after(DEADLINE_SECONDS):
                    while not await anyio.Path(node.socket(resource)).is_socket():
                        await anyio.sleep(0.02)
                listener.follow(node.socket(resource), resource, stack)
            await anyio.sleep(SPACING_SECONDS)
        stack.callback(listener.closing)
        await anyio.to_thread.run_sync(listener.wait, modes[-1])
        for number in range(count):
            for mode in (modes[0], modes[1 + number % (len(modes) - 1)]):
                took = await anyio.to_thread.run_sync(switch, mode, listener)
                if mode == modes[0] or (len(modes) == 2 and "mps" not in modes):
                    taken.append(took)
                await anyio.sleep(SPACING_SECONDS)
        return taken, listener.ended


@asynccontextmanager
async def _node(conditions: Conditions, **more: object) -> AsyncIterator[Node]:
    """An agent that reads its mode from a file."""
    async with conditions.node() as node:
        file = node.folder / "mode"
        await anyio.to_thread.run_sync(file.write_text, "pgpu")
        node.agent.settings |= {"modeFile": str(file), **more}
        # A real kubelet is faster than the embedded one, which takes 70 ms to read a list of fractions.
        await node.kubelet.stop()
        with pod_resources(node.kubelet.pod_resources_socket):
            await node.agent.start()
            try:
                yield node
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(SPACING_SECONDS)
                    await anyio.to_thread.run_sync(file.write_text, "disable")  # no daemon is left behind
                    await anyio.to_thread.run_sync(_wait_for_daemons, node.folder / "run")


def _wait_for_daemons(run: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while list(run.glob("mps/*/pipe")) and time.monotonic() < deadline:
        time.sleep(0.1)


async def _cpu_per_second(node: Node, seconds: float) -> float:
    """Processor time of an agent that is left alone."""
    before = node.agent.cpu_seconds()
    await anyio.sleep(seconds)
    return (node.agent.cpu_seconds() - before) / seconds


@measurement(
    Figure("switch_p99_ms", "ms", 20, "mode asked for until the new lists of all resources are read, 8 GPUs"),
    Figure("switch_cpu_ms", "ms of CPU", None, "processor time of the agent for one of these; busy or not"),
    Figure("switch_streams_ended", "streams", 0, "how many ListAndWatch ended during all these switches"),
)
async def switch(conditions: Conditions) -> Mapping[str, Taken]:
    """Whole GPUs to fractions and back; idle GPUs, no API server."""
    async with _node(conditions) as node:
        # Warm: the first use of a mode registers its resources.
        await _switches(node, ("vgpu", "pgpu"), 1)
        idle = await _cpu_per_second(node, IDLE_SECONDS)
        began, before = time.perf_counter(), node.agent.cpu_seconds()
        taken, ended = await _switches(node, ("vgpu", "pgpu"), SWITCHES // 2)
        used = node.agent.cpu_seconds() - before - idle * (time.perf_counter() - began)
        cpu = used * 1000 / (len(taken) + 2)  # the two that open the streams count, too
    return {
        "switch_p99_ms": Taken(percentile(taken, 0.99), len(taken)),
        "switch_cpu_ms": Taken(cpu, len(taken)),
        "switch_streams_ended": Taken(ended, len(taken)),
    }


@measurement(
    Figure("switch_to_mps_p99_ms", "ms", None, "the same from whole GPUs to MPS, start of 8 daemons included")
)
async def switch_to_mps(conditions: Conditions) -> Mapping[str, Taken]:
    """With NVIDIA's real control daemon; the MPS server would need a GPU."""
    program = await anyio.to_thread.run_sync(control_program, max(SUITES))
    extra = {
        "mps.controlProgram": str(program),
        "mps.prestartServer": False,
    }
    async with _node(conditions, **extra) as node:
        taken, _ = await _switches(node, ("mps", "pgpu"), MPS_SWITCHES)
    return {"switch_to_mps_p99_ms": Taken(percentile(taken, 0.99), len(taken))}


@measurement(
    Figure(
        "label_to_pod_running_p50_ms",
        "ms",
        1000,
        "label set until a pod that waited for the mode runs; real cluster, kubelet's tick 10 s; median",
    ),
    cluster=True,
)
async def label_to_pod_running(_: Conditions) -> Mapping[str, Taken]:
    """Between whole GPUs and fractions, each time with one pod that waits for the other mode."""
    options = Options(status_tick=PRODUCTION_TICK_SECONDS)
    cluster = await anyio.to_thread.run_sync(lambda: Cluster(build_parts(print), options))
    taken: list[float] = []
    try:
        await anyio.to_thread.run_sync(cluster.up)
        async with real_rig(cluster) as rig, mode_node(rig) as node:
            await node.want("pgpu")
            await node.offers("pgpu")
            for number in range(LABELS):
                mode = ("vgpu", "pgpu")[number % 2]
                pod = pod_of(mode, f"waits-{number}")
                await node.create(pod)
                await anyio.sleep(1.5)  # the scheduler has looked at it, and the last request has settled
                began = time.perf_counter()
                await node.want(mode)
                await rig.wait_phase(pod, Phase.RUNNING, DEADLINE_SECONDS)
                taken.append((time.perf_counter() - began) * 1000)
                await node.end(pod)
                await rig.wait_allocatable(8 * COUNTED[mode][1], COUNTED[mode][0])
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(cluster.down)
    return {"label_to_pod_running_p50_ms": Taken(statistics.median(taken), len(taken))}
