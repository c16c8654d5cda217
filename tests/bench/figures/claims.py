"""Claims (DRA) on a real kubelet and scheduler: their cost for a pod, and how fast a GPU comes back."""

import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Mapping

import anyio.to_thread

from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.status.client import ask
from agent.web.control import NAME as CONTROL_SOCKET
from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.cluster.build import build_parts
from tests.cluster.claims_node import ClaimsNode, claims_node, share, whole
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import manifest, templates

PODS = 30
RETURNS = 10
BACKOFF_SECONDS = 2.0  # after it the scheduler looks at a pod that waits whenever something changes


@measurement(
    Figure(
        "dra_pod_start_over_plain_ms",
        "ms",
        30,
        "a pod with an MPS share by claim over a plain one, POST until it runs; in turn, medians",
    ),
    Figure(
        "dra_prepare_p99_ms", "ms", 25, "a claim is prepared, its MPS daemon running; by the agent's clock"
    ),
    Figure("dra_prepare_cold_ms", "ms", None, "the same where it starts the daemon; median"),
    Figure("dra_switch_ms", "ms", 30, "a GPU is given back until the pod that waits for it is bound; median"),
    cluster=True,
)
async def claims(_: Conditions) -> Mapping[str, Taken]:
    """One cluster for all of them."""
    return await anyio.to_thread.run_sync(_measured)


def _measured() -> Mapping[str, Taken]:
    with Cluster(build_parts(print)) as cluster, claims_node(cluster) as (node, _):
        cold: list[float] = []
        warm: list[float] = []
        plain: list[float] = []
        claimed: list[float] = []
        prepares = _Prepares(node)
        for number in range(5):
            _started(node, share(f"cold-{number}", 10, 4))
            cold.append(prepares.last())
            node.clear()
        node.run(share("keeps", 10, 4))  # the daemon stays
        prepares.last()
        for number in range(PODS):
            for values, pod in (
                (plain, PodSpec(f"plain-{number}", (ContainerSpec("main"),))),
                (claimed, share(f"claimed-{number}", 10, 4)),
            ):
                values.append(_started(node, pod))
                if pod.claims:
                    warm.append(prepares.last())
                node.delete(pod)
        node.clear()
        returns = [_returned(node, number) for number in range(RETURNS)]
    return {
        "dra_pod_start_over_plain_ms": Taken(statistics.median(claimed) - statistics.median(plain), PODS),
        "dra_prepare_p99_ms": Taken(percentile(warm, 0.99), PODS),
        "dra_prepare_cold_ms": Taken(statistics.median(cold), len(cold)),
        "dra_switch_ms": Taken(statistics.median(returns), RETURNS),
    }


def _started(node: ClaimsNode, pod: PodSpec) -> float:
    """Milliseconds from the POST until the pod is seen to run."""
    for template in templates(pod):
        node.cluster.apply(template)
    return _seen(
        node,
        lambda: node.cluster.apply(manifest(pod, node.cluster.node)),
        pod.name,
        lambda found: bool(found["status"].get("phase") == "Running"),
    )


def _returned(node: ClaimsNode, number: int) -> float:
    """Milliseconds from `uncordon` until the pod that waits for the GPU has a node."""
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
    taken = _seen(
        node,
        lambda: ask(control, "uncordon", gpu=gpu),
        waits.name,
        lambda found: bool(found["spec"].get("nodeName")),
    )
    node.clear()
    return taken


def _seen(
    node: ClaimsNode,
    act: Callable[[], object],
    name: str,
    reached: Callable[[Mapping[str, dict[str, object]]], bool],
) -> float:
    """Milliseconds from `act` until a watch shows a pod so."""
    api = node.cluster.api
    path = api.path("v1", "Pod", "default")
    version = api.get(path)["metadata"]["resourceVersion"]
    watch = api.watch(path, version, fieldSelector=f"metadata.name={name}")
    began = time.perf_counter()
    act()
    try:
        for _, found in watch:
            if reached(found):
                return (time.perf_counter() - began) * 1000
    finally:
        watch.close()
    raise TimeoutError(f"the watch of pod {name} ended before it was seen so")


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
