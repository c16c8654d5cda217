"""NVIDIA's DRA driver beside the agent's door, on one node with a GPU for each.

It offers all GPUs of a node and knows of no layout: its DeviceClass leaves those out that are the agent's.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.simulator.kubelet.pod_specs import ContainerSpec, PodClaim, PodSpec
from tests.bench.figures.claims import started
from tests.bench.registry import percentile
from tests.cluster import toolkit
from tests.cluster.agent_process import REPOSITORY
from tests.cluster.api import ApiClient
from tests.cluster.build import Parts
from tests.cluster.build.container_toolkit import container_toolkit
from tests.cluster.build.peers import NVIDIA_DRA, BuiltPeer, Peer
from tests.cluster.claims_node import DRIVER, ClaimsNode, claims_node, gpu_of, share, whole
from tests.cluster.real_rig import RESOURCES
from tests.cluster.rig import Cluster
from tests.nvml_double.build import STATE_VARIABLE
from tests.peers.program import running

THEIRS = "gpu.nvidia.com"
CDI_KIND = "k8s.gpu.nvidia.com"
ROUNDS = 15
FIGURES = REPOSITORY / "build" / "beside-nvidia-dra.json"
LAYOUT = ({"gpus": [0], "mode": "dra"}, {"gpus": [1], "mode": "off"})
REGISTERED_SECONDS = 60.0


@pytest.fixture(scope="module")
def node(parts: Parts) -> Iterator[ClaimsNode]:
    """Of its two GPUs the first is the door's, the second is in no mode of the agent's."""
    with Cluster(parts) as cluster, claims_node(cluster) as (made, _):
        made.stop()
        made.start_with_layout("beside", LAYOUT)
        # Those of the other GPU go once it has drained.
        made.until(lambda: len(made.devices()) == 2, "one GPU is two devices")
        yield made


def _theirs(name: str) -> PodSpec:
    """A pod with a whole GPU of NVIDIA's driver."""
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": THEIRS}}]}}
    claims = (PodClaim("gpu", template=spec),)
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=claims)


@dataclass
class Neighbour:
    """NVIDIA's driver on the node."""

    node: ClaimsNode
    program: Path
    root: Path  # of a driver, as the host has it
    hook: Path
    lives: int = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """It runs, and has published the GPUs."""
        self.lives += 1
        cluster = self.node.cluster
        argv = [
            *(str(self.program), f"--node-name={cluster.node}", "--image-name=none", "-v=4"),
            *(f"--container-driver-root={self.root}", f"--nvidia-driver-root={self.root}"),
            *(f"--cdi-root={cluster.cdi_dir}", f"--nvidia-cdi-hook-path={self.hook}"),
            f"--kubelet-registrar-directory-path={cluster.kubelet_root / 'plugins_registry'}",
            f"--kubelet-plugins-directory-path={cluster.kubelet_root / 'plugins'}",
        ]
        log = self.root / f"driver-{self.lives}.log"
        with running(cluster, argv, log, {STATE_VARIABLE: str(self.node.rig.folder / "machine")}) as process:

            def published() -> bool:
                assert process.poll() is None, f"it ended by itself: {log.read_text()[-2000:]}"
                return len(self.devices()) == len(self.node.rig.gpu_uuids())

            self.node.until(published, "NVIDIA's driver publishes the GPUs", REGISTERED_SECONDS)
            try:
                yield
            except BaseException:
                self.node.clear()  # without it, pods that have its GPUs would not end
                raise

    def devices(self) -> set[str]:
        """UUIDs of its devices."""
        return {
            each["attributes"]["uuid"]["string"]
            for item in self.node.all_slices()
            if item["spec"]["driver"] == THEIRS
            for each in item["spec"]["devices"]
        }

    def files(self) -> set[str]:
        """Its CDI files."""
        return {each.name for each in self.node.cluster.cdi_dir.iterdir() if CDI_KIND in each.read_text()}


@pytest.fixture
def neighbour(node: ClaimsNode, peer: Callable[[Peer], BuiltPeer], tmp_path: Path) -> Neighbour:
    rig = node.rig
    toolkit.make_driver_root(tmp_path, rig.driver_version, rig.library)
    toolkit.make_device_nodes(tmp_path, {uuid: number for number, uuid in enumerate(rig.gpu_uuids())})
    smi = tmp_path / "usr/bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\n")  # looked for, and called for time slices alone
    mine = rig.gpu_uuids()[1]
    attributes = f"device.attributes['{THEIRS}']"
    rule = f"device.driver == '{THEIRS}' && {attributes}.type == 'gpu' && {attributes}.uuid == '{mine}'"
    node.cluster.apply(
        {
            "apiVersion": RESOURCES,
            "kind": "DeviceClass",
            "metadata": {"name": THEIRS},
            "spec": {"selectors": [{"cel": {"expression": rule}}]},
        }
    )
    return Neighbour(node, peer(NVIDIA_DRA).program, tmp_path, container_toolkit() / "nvidia-cdi-hook")


@dataclass
class Possessions:
    """All that a driver has on the node and in the API: the same as long as nobody touches it."""

    slices: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    sockets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, node: ClaimsNode, *, ours: bool) -> "Possessions":
        def mine(text: str) -> bool:
            return (THEIRS in text or CDI_KIND in text) != ours

        cluster = node.cluster
        registry = cluster.kubelet_root / "plugins_registry"
        return cls(
            {
                each["metadata"]["uid"]: each["spec"]
                for each in node.all_slices()
                if mine(each["spec"]["driver"])
            },
            {
                each.name: hashlib.sha256(each.read_bytes()).hexdigest()
                for each in cluster.cdi_dir.iterdir()
                if mine(each.read_text())
            },
            {each.name: each.stat().st_ino for each in registry.iterdir() if mine(each.name)},
        )


class KubeletClock:
    """Milliseconds that calls to prepare took since `reset`, by the kubelet's own sums."""

    def __init__(self, node: ClaimsNode) -> None:
        cluster = node.cluster
        ports = cluster.get("Node", cluster.node)["status"]["daemonEndpoints"]
        self._kubelet = ApiClient(ports["kubeletEndpoint"]["Port"], cluster.layout.certificates)
        self._before: Mapping[str, float] = {}

    def close(self) -> None:
        self._kubelet.close()

    def reset(self) -> None:
        self._before = self._sums()

    def milliseconds(self, driver: str) -> float:
        return (self._sums()[driver] - self._before.get(driver, 0.0)) * 1000

    def _sums(self) -> Mapping[str, float]:
        text = str(self._kubelet.request("GET", "/metrics"))
        found = defaultdict[str, float](float)
        for labels, value in re.findall(
            r"^dra_grpc_operations_duration_seconds_sum\{(.*)\} (\S+)$", text, re.MULTILINE
        ):
            driver, method = (
                re.findall(rf'{name}="([^"]*)"', labels)[0] for name in ("driver_name", "method_name")
            )
            if method.endswith("/NodePrepareResources"):
                found[driver] += float(value)
        return found


@pytest.mark.timeout(500, func_only=True)
def test_nvidia_dra_driver_beside_ours(node: ClaimsNode, neighbour: Neighbour) -> None:
    """Nothing of theirs is touched by ours, and the reverse. What both take stands in `FIGURES`."""
    first, second = node.rig.gpu_uuids()
    ours = Possessions.of(node, ours=True)
    with neighbour.serving():
        assert neighbour.devices() == {first, second}
        theirs = Possessions.of(node, ours=False)
        FIGURES.parent.mkdir(exist_ok=True)
        FIGURES.write_text(json.dumps(_in_turn(node), indent=1))
        # Nobody has touched what is the other's, and the claims have left nothing behind.
        assert Possessions.of(node, ours=True) == ours
        assert Possessions.of(node, ours=False) == theirs

        keeps, by_nvidia = share("keeps", 10, 4), _theirs("by-nvidia")
        node.run(keeps, by_nvidia)
        assert gpu_of(node.device(keeps)) == first.lower()
        assert node.environment(keeps)["NVIDIA_VISIBLE_DEVICES"]
        nodes = node.call(node.rig.container_device_nodes, by_nvidia, "main")
        assert {each for each in nodes if re.fullmatch(r"/dev/nvidia\d+", each)} == {"/dev/nvidia1"}
        assert set(node.daemons()) == {first}
        assert len(neighbour.files()) == 1
        # The agent is killed and comes back: NVIDIA's pods come and go meanwhile, and after it.
        node.kill()
        node.delete(by_nvidia)
        node.run(again := _theirs("again"))
        node.start_with_layout("beside", LAYOUT)
        node.run(more := share("more", 10, 4))
        assert set(node.daemons()) == {first}
    # NVIDIA's driver is killed: its pod runs on, and the agent's come and go.
    containers = [node.container(each) for each in (keeps, again)]
    node.delete(more)
    node.run(last := share("last", 20, 4))
    assert [node.container(each) for each in (keeps, again)] == containers
    assert len(neighbour.files()) == 1
    with neighbour.serving():
        node.delete(keeps, again, last)
        assert not neighbour.files()
        node.run(heir := whole("heir"), final := _theirs("final"))
        assert gpu_of(node.device(heir)) == first.lower()
        node.delete(heir, final)
    assert not node.logged("claim_refused")


def _in_turn(node: ClaimsNode) -> Mapping[str, float]:
    """Prepare and pod start, in milliseconds: whole GPUs of both, and shares whose daemon runs."""
    with closing(KubeletClock(node)) as clock:
        return _rounds(node, clock)


def _rounds(node: ClaimsNode, clock: KubeletClock) -> Mapping[str, float]:
    made = {"whole": whole, "share": lambda name: share(name, 10, 4), "nvidia": _theirs}
    found: dict[str, float] = {}
    for kind in ("whole", "share"):
        keeper = share("keeper", 10, 4)
        if kind == "share":
            node.run(keeper)
        prepares, starts = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for turn in range(ROUNDS):
            for name in (kind, "nvidia"):
                pod = made[name](f"{name}-{turn}")
                clock.reset()
                starts[name].append(started(node, pod)[1])
                prepares[name].append(clock.milliseconds(THEIRS if name == "nvidia" else DRIVER))
                node.delete(pod)
        if kind == "share":
            node.delete(keeper)
        for name in (kind, "nvidia"):
            where = name if name == kind else f"{name} beside {kind}"
            found |= {
                f"{where}: prepare p50": percentile(prepares[name], 0.5),
                f"{where}: prepare p99": percentile(prepares[name], 0.99),
                f"{where}: pod start p50": percentile(starts[name], 0.5),
            }
    return {name: round(value, 1) for name, value in found.items()}
