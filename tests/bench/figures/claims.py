"""Claims (DRA) on a real kubelet and scheduler: their cost for a pod, and how fast a GPU comes back."""

import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import anyio.to_thread

from agent.model.modes import SHARES
from agent.modes.withholding import ANNOTATION as CORDON
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.web.control import NAME as CONTROL_SOCKET
from agent.web.control import ask
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.cluster.api import ApiClient, Object
from tests.cluster.build import build_parts
from tests.cluster.claims_node import ClaimsNode, claims_node, share, whole
from tests.cluster.real_rig import RESOURCES
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import manifest, templates
from tests.pace import scaled

Events = Iterator[tuple[str, Object]]

PODS = 30
RETURNS = 10
NO_CORDON = {"metadata": {"annotations": {CORDON: None}}}
BACKOFF_SECONDS = 2.0  # after it the scheduler looks at a pod that waits whenever something changes


@measurement(
    Figure(
        "dra_pod_start_over_plain_ms",
        "ms",
        30,
        "an MPS share by claim over the same by device plugin: POST until the pod runs; in turn, medians",
    ),
    Figure("dra_pod_start_over_no_gpu_ms", "ms", None, "the same over a pod without a GPU"),
    Figure("dra_pod_bound_over_plain_ms", "ms", None, "of it, until it is bound: the control plane's share"),
    Figure(
        "dra_prepare_p99_ms", "ms", 25, "a claim is prepared, its MPS daemon running; by the agent's clock"
    ),
    Figure("dra_prepare_cold_ms", "ms", None, "the same where it starts the daemon; median"),
    Figure(
        "dra_switch_ms",
        "ms",
        30,
        "a cordon is gone from the node until the pod that waits for the GPU is bound; median",
    ),
    Figure("dra_switch_scheduler_ms", "ms", None, "of it, from our slice on: the scheduler's share"),
    cluster=True,
)
async def claims(_: Conditions) -> Mapping[str, Taken]:
    """One cluster for all of them."""
    return await anyio.to_thread.run_sync(_measured)


# By claim GPU 0, by device plugin GPU 1: of each pod the GPU comes to its container in the same way.
DOORS = [{"gpus": [0], "mode": "dra"}, {"gpus": [1], "mode": "mps"}]


def _measured() -> Mapping[str, Taken]:
    with Cluster(build_parts(print)) as cluster, claims_node(cluster) as (node, _):
        node.kill()
        node.start_with_layout("doors", DOORS)
        prepares = _Prepares(node)
        cold: list[float] = []
        for number in range(5):
            started(node, share(f"cold-{number}", 10, 4))
            cold.append(prepares.last())
            node.clear(daemons=1)
        warm, taken = _side_by_side(node, prepares)
        node.label("dra")
        node.published()
        returns = [_returned(node, number) for number in range(RETURNS)]
    bound, runs = (
        {kind: statistics.median(each[at] for each in taken[kind]) for kind in taken} for at in (0, 1)
    )
    return {
        "dra_pod_start_over_plain_ms": Taken(runs["claim"] - runs["plugin"], PODS),
        "dra_pod_start_over_no_gpu_ms": Taken(runs["claim"] - runs["none"], PODS),
        "dra_pod_bound_over_plain_ms": Taken(bound["claim"] - bound["plugin"], PODS),
        "dra_prepare_p99_ms": Taken(percentile(warm, 0.99), PODS),
        "dra_prepare_cold_ms": Taken(statistics.median(cold), len(cold)),
        "dra_switch_ms": Taken(statistics.median(whole for whole, _ in returns), RETURNS),
        "dra_switch_scheduler_ms": Taken(statistics.median(part for _, part in returns), RETURNS),
    }


def _side_by_side(
    node: ClaimsNode, prepares: "_Prepares"
) -> tuple[list[float], Mapping[str, list[tuple[float, float]]]]:
    """Times of preparations, and of pods: a share by claim, the same by plugin, and none, in turn."""
    warm: list[float] = []
    taken: dict[str, list[tuple[float, float]]] = {"plugin": [], "claim": [], "none": []}
    node.run(share("keeps", 10, 4))  # the daemon stays, as that of the plugin does
    prepares.last()
    units = {SHARES.row.pair.core: 10, SHARES.row.pair.memory: 4} if SHARES.row.pair else {}
    for number in range(PODS):
        pods = {
            "plugin": PodSpec(f"plugin-{number}", (ContainerSpec("main", units),)),
            "claim": share(f"claim-{number}", 10, 4),
            "none": PodSpec(f"none-{number}", (ContainerSpec("main"),)),
        }
        for kind, pod in pods.items():
            taken[kind].append(started(node, pod))
            if pod.claims:
                warm.append(prepares.last())
            node.delete(pod)
    node.clear(daemons=1)
    return warm, taken


def started(node: ClaimsNode, pod: PodSpec) -> tuple[float, float]:
    """Milliseconds from the POST until the pod is seen to have a node, and to run."""
    for template in templates(pod):
        node.cluster.apply(template)
    api = node.cluster.api
    with _watched(api, api.path("v1", "Pod", "default"), metadata=pod.name) as pods:
        began = time.perf_counter()
        node.cluster.apply(manifest(pod, node.cluster.node))
        bound = _first(pods, lambda found: bool(found["spec"].get("nodeName")))
        runs = _first(pods, lambda found: bool(found["status"].get("phase") == "Running"))
    return (bound - began) * 1000, (runs - began) * 1000


def _returned(node: ClaimsNode, number: int) -> tuple[float, float]:
    """Milliseconds from the end of a cordon until the pod that waits has a node; those since our slice."""
    filler, waits = whole(f"filler-{number}"), whole(f"waits-{number}")
    node.run(filler)
    (device,) = {name for name in node.devices() if name.endswith("whole")} - {node.device(filler)}
    gpu = next(each for each in node.rig.gpu_uuids() if each.lower() in device)
    control = node.mps.run / CONTROL_SOCKET
    ask(control, "cordon", gpu=gpu, reason="bench")
    node.until(lambda: bool(node.devices()[device].get("taints")), "the GPU is tainted")
    node.create(waits)
    node.waits(waits)
    time.sleep(BACKOFF_SECONDS)

    def free(found: Object) -> bool:
        devices = {each["name"]: each for each in found["spec"].get("devices", ())}
        return device in devices and not devices[device].get("taints")

    api = node.cluster.api
    with (
        ThreadPoolExecutor(1) as pool,
        _watched(api, api.path(RESOURCES, "ResourceSlice", None)) as slices,
        _watched(api, api.path("v1", "Pod", "default"), metadata=waits.name) as pods,
    ):
        given = pool.submit(_first, slices, free)
        api.merge_patch(api.path("v1", "Node", None, node.cluster.node), NO_CORDON)
        began = time.perf_counter()
        bound = _first(pods, lambda found: bool(found["spec"].get("nodeName")))
        ours = given.result(timeout=scaled(10))
    node.clear()
    return (bound - began) * 1000, (bound - ours) * 1000


@contextmanager
def _watched(api: ApiClient, path: str, metadata: str = "") -> Iterator[Events]:
    """Events from now on, of the object of a name or of all."""
    version = api.get(path)["metadata"]["resourceVersion"]
    watch = api.watch(path, version, **({"fieldSelector": f"metadata.name={metadata}"} if metadata else {}))
    try:
        yield iter(watch)
    finally:
        watch.close()


def _first(events: Events, reached: Callable[[Object], bool]) -> float:
    """When they show an object so, by the clock of `time.perf_counter`."""
    for _, found in events:
        if reached(found):
            return time.perf_counter()
    raise TimeoutError("the watch ended before the object was seen so")


class _Prepares:
    """Times of preparations, from the agent's own counter."""

    def __init__(self, node: ClaimsNode) -> None:
        self._node = node
        self._total = 0.0

    def last(self) -> float:
        """Milliseconds of all since the last call."""
        port = self._node.logged("http_listening")[-1]["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        (found,) = re.findall(r"^gpu_agent_dra_prepare_seconds_total (\S+)$", text, re.MULTILINE)
        before, self._total = self._total, float(found)
        return (self._total - before) * 1000
