"""Four simulated nodes at work, and a Prometheus that scrapes their agents: what the boards are drawn from.

Recording rules run with their own windows, at the pace of the scrapes: half a second is a minute of bills.
"""

import math
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import yaml

from agent.model.modes import SHARES, WHOLE_GPUS
from agent.model.pod import MPS, VGPU
from agent.model.resource_claim import device_name
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from agent.simulator.state import ProcessKind
from tests.component.dra.test_door import asking, device_class
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import PACE, Prometheus, served
from tests.component.monitoring.test_prometheus import page_of, port_of
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.monitoring import Work
from tests.scenarios.rig import GPU
from tests.scenarios.skeleton import unschedulable

SECONDS = 150  # that are recorded
WARM_SECONDS = 12  # of load before the first scrape, and of scrapes before the record: means begin with it
WINDOW_SECONDS = 5
CLUSTER = "c1"
LAYOUTS = {
    "mixed": [
        {"gpus": ["0-1"], "mode": "pgpu"},
        {"gpus": ["2-3"], "mode": "vgpu"},
        {"gpus": ["4-5"], "mode": "mps"},
        {"gpus": [6], "mode": "dra"},
        {"gpus": [7], "mode": "mig"},
    ]
}
INSTANCES = ("3g.71gb", "1g.18gb", "1g.18gb")  # of the last GPU of the first node


@dataclass(frozen=True)
class Member:
    """A pod with its controller, and the load of its process: percent at most, MiB."""

    spec: PodSpec
    owner: tuple[str, str]
    percent: int
    mib: int
    late: bool = False  # comes when half of the time is over

    @property
    def mode(self) -> str:
        """By what it asks for."""
        asked = self.spec.containers[0].limits
        return "dra" if not asked else "pgpu" if GPU in asked else "vgpu" if VGPU.core in asked else "mps"


def _pod(name: str, namespace: str, **limits: int) -> PodSpec:
    asked: Mapping[str, int]
    if "gpus" in limits:
        asked = {GPU: limits["gpus"]}
    else:
        pair = VGPU if "vgpu" in limits else MPS
        cores = limits["vgpu"] if "vgpu" in limits else limits["mps"]
        asked = {pair.core: cores, pair.memory: (limits["gib"] << 30) // pair.block_bytes}
    return PodSpec(name, (ContainerSpec("main", asked),), namespace=namespace)


def _claiming(name: str, namespace: str, cores: int, gib: int) -> PodSpec:
    made = asking(name, SHARES, cores, gib)
    claims: tuple[PodClaim, ...] = made.claims
    return PodSpec(name, made.containers, namespace=namespace, claims=claims)


def _job(name: str) -> tuple[str, str]:
    return ("Job", name)


def _deployment(name: str) -> tuple[str, str]:
    return ("ReplicaSet", f"{name}-6c8d9f7b5d")


NODES: Mapping[str, tuple[str, Sequence[Member]]] = {
    "gpu-1": (
        "mixed",
        (
            Member(_pod("train", "research", gpus=1), _job("train-17"), 92, 60_000),
            Member(_pod("notebook", "research", vgpu=30, gib=24), ("StatefulSet", "notebook"), 9, 7_000),
            Member(_pod("index", "search", gpus=1), ("StatefulSet", "index"), 55, 90_000),
            Member(_pod("classifier", "search", vgpu=40, gib=30), _deployment("classifier"), 31, 21_000),
            Member(_pod("late-model", "search", vgpu=25, gib=20), _deployment("late-model"), 18, 9_000, True),
            Member(_pod("rank", "search", mps=50, gib=40), _deployment("rank"), 42, 33_000),
            Member(_pod("chat", "chat", mps=30, gib=24), _deployment("chat"), 22, 19_000),
            Member(_claiming("answers", "chat", 40, 32), _deployment("answers"), 24, 14_000),
            Member(_claiming("embed", "chat", 25, 16), _deployment("embed"), 12, 8_000, True),
        ),
    ),
    "gpu-2": (
        "pgpu",
        (
            *(
                Member(_pod(f"tune-{n}", "research", gpus=1), _job("tune"), 96 - 4 * n, 120_000 - 9_000 * n)
                for n in range(6)
            ),
            Member(_pod("lab", "research", gpus=1), ("<none>", "<none>"), 2, 900),
        ),
    ),
    "gpu-3": (
        "vgpu",
        tuple(
            Member(
                _pod(f"web-{n}", "shop", vgpu=35 + 5 * n, gib=20 + 4 * n),
                _deployment("web"),
                20 + 5 * n,
                11_000,
            )
            for n in range(4)
        ),
    ),
    "gpu-4": (
        "mps",
        tuple(
            Member(
                _pod(f"voice-{n}", "chat", mps=20 + 10 * n, gib=16), _deployment("voice"), 15 + 8 * n, 9_000
            )
            for n in range(3)
        ),
    ),
}
WAITS = Member(_pod("big", "research", gpus=4), _job("big"), 0, 0)  # for more than is free
QUOTAS = {
    ("research", GPU): 12,
    ("research", VGPU.core): 100,
    ("search", GPU): 2,
    ("search", VGPU.core): 100,
    ("search", MPS.core): 100,
    ("shop", VGPU.core): 200,
    ("shop", VGPU.memory): 800,
    ("chat", MPS.core): 200,
    ("chat", MPS.memory): 160,
}


@dataclass
class Site:
    """One node at work."""

    name: str
    node: ModeNode
    rig: EmbeddedRig
    work: Work
    members: dict[int, tuple[Member, int]] = field(default_factory=dict)  # PID -> itself, index of its GPU

    async def run(self, members: Sequence[Member]) -> None:
        """Pods, and a process in each."""
        for each in members:
            await self.node.create(each.spec)
        for each in members:
            await self.rig.wait_phase(each.spec, Phase.RUNNING, 60)
            kind = ProcessKind.MPS if each.mode in ("mps", "dra") else ProcessKind.COMPUTE
            pid, index = await self.rig.container_pid(each.spec, "main"), await self._index(each)
            self.rig.machine.processes.start(index, pid, kind, each.mib)
            self.members[pid] = (each, index)

    async def _index(self, member: Member) -> int:
        if member.mode != "dra":
            return await self.node.index_of(member.spec)
        (device,) = {each.device for each in await self.rig.claimed(member.spec, "main")}
        uuids = self.rig.gpu_uuids()
        return next(at for at, uuid in enumerate(uuids) if device_name(uuid, SHARES) == device)

    def load(self, now: float) -> None:
        """Have each process and each GPU do what it does at this second."""
        busy = [0.0] * 8
        for number, (pid, (member, index)) in enumerate(self.members.items()):
            percent = max(1, int(member.percent * (0.8 + 0.2 * math.sin(now / (9 + number) + number))))
            self.work.shares[pid] = percent
            busy[index] += percent
        for slot, percent in enumerate(min(100, int(each)) for each in busy):
            if self.name == "gpu-1" and slot == 7:
                continue  # a GPU in MIG mode has no such figures
            self.rig.machine.load(
                slot, utilization=percent, power_w=74 + 5.6 * percent, temperature_c=31 + percent // 3
            )
            parts = (percent, percent * 4 // 5, percent // 3, percent // 2)
            self.rig.machine.gpu(slot).activity[:] = list(parts)


@asynccontextmanager
async def recorded() -> AsyncIterator[Prometheus]:
    """Prometheus, once it has seen the nodes at work for `SECONDS`."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gna-")))
        library = folder / "library.so"
        await anyio.to_thread.run_sync(library.write_bytes, b"\x7fELF")  # containers see it, nobody loads it
        sites = [
            await stack.enter_async_context(_site(name, mode, library)) for name, (mode, _) in NODES.items()
        ]
        for site in sites:
            await site.run([each for each in NODES[site.name][1] if not each.late])
        await sites[1].node.create(WAITS.spec)
        await unschedulable(sites[1].rig, WAITS.spec)
        async with anyio.create_task_group() as group:
            for site in sites:
                group.start_soon(site.work.run)
            group.start_soon(_days, sites)
            await anyio.sleep(WARM_SECONDS)
            async with page_of("".join(kube_state())) as others:
                configuration = await _configuration(folder, sites, others)
                async with served(folder, configuration, "--query.lookback-delta=15s") as server:
                    await anyio.sleep(SECONDS / 2 + WARM_SECONDS)
                    for site in sites:
                        await site.run([each for each in NODES[site.name][1] if each.late])
                    sites[3].rig.machine.fall_off_bus(7)
                    await sites[2].node.want("pgpu")  # its pods go on, and their GPUs drain
                    await anyio.sleep(SECONDS / 2)
                    yield server
            group.cancel_scope.cancel()


@asynccontextmanager
async def _site(name: str, mode: str, library: Path) -> AsyncIterator[Site]:
    async with embedded_rig("1.37") as rig:
        if mode == "mixed":
            for whole in (WHOLE_GPUS, SHARES):
                await rig.create_resource("DeviceClass", device_class(whole))
            rig.machine.set_mig(7, enabled=True)
            for profile in INSTANCES:
                rig.machine.make_instance(7, profile)
        settings = {
            "dra__enabled": mode == "mixed",
            "mps__probeSeconds": 0.5,
            "sampling__activity": True,
            "sampling__windowSeconds": WINDOW_SECONDS,
            "vgpu__enforcement": "library",
            "vgpu__compute": "hard",
            "vgpu__library": str(library),
        }
        layouts = LAYOUTS if mode == "mixed" else {}
        async with mode_node(rig, layouts=layouts, **settings) as node:
            await node.want(mode)
            await node.applied(mode)
            yield Site(name, node, rig, Work(node))


async def _days(sites: Sequence[Site]) -> None:
    began = anyio.current_time()
    while True:
        for site in sites:
            site.load(anyio.current_time() - began)
        await anyio.sleep(0.5)


async def _configuration(folder: Path, sites: Sequence[Site], others: int) -> Mapping[str, object]:
    rules = {}
    for path in queries.RULES:
        document = yaml.safe_load(await anyio.to_thread.run_sync(path.read_text))
        for group in document["groups"]:
            group.pop("interval", None)
        rules[folder / path.name] = yaml.safe_dump(document)
    for file, text in rules.items():
        await anyio.to_thread.run_sync(file.write_text, text)
    agents = [
        {
            "targets": [f"127.0.0.1:{await port_of(site.node)}"],
            "labels": {"node": site.name, "cluster": CLUSTER},
        }
        for site in sites
    ]
    kube = [{"targets": [f"127.0.0.1:{others}"], "labels": {"cluster": CLUSTER}}]
    return {
        "global": {"scrape_interval": PACE, "scrape_timeout": PACE, "evaluation_interval": PACE},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [
            {"job_name": job, "honor_labels": True, "static_configs": configs}
            for job, configs in (("gpu-node-agent", agents), ("kube-state-metrics", kube))
        ],
    }


def kube_state() -> Iterator[str]:
    """The same cluster as kube-state-metrics has it."""
    offered = {
        "gpu-1": {GPU: 2, VGPU.core: 200, MPS.core: 200},
        "gpu-2": {GPU: 8},
        "gpu-3": {VGPU.core: 800},
        "gpu-4": {MPS.core: 800},
    }
    used: dict[tuple[str, str], int] = {}
    for node, (_, members) in NODES.items():
        yield f'kube_node_info{{node="{node}"}} 1\n'
        for resource, count in offered[node].items():
            yield f'kube_node_status_allocatable{{node="{node}",resource="{_kube(resource)}"}} {count}\n'
        for each in members:
            yield from _kube_pod(each, node)
            for resource, count in each.spec.containers[0].limits.items():
                key = (each.spec.namespace, resource)
                used[key] = used.get(key, 0) + count
    yield from _kube_pod(WAITS, "")
    for (namespace, resource), hard in QUOTAS.items():
        labels = f'namespace="{namespace}",resourcequota="gpus",resource="requests.{resource}"'
        yield f'kube_resourcequota{{{labels},type="hard"}} {hard}\n'
        yield f'kube_resourcequota{{{labels},type="used"}} {used[namespace, resource]}\n'


def _kube(resource: str) -> str:
    return resource.replace(".", "_").replace("/", "_").replace("-", "_")


def _kube_pod(member: Member, node: str) -> Iterator[str]:
    pod = f'namespace="{member.spec.namespace}",pod="{member.spec.name}"'
    kind, name = member.owner
    yield f'kube_pod_owner{{{pod},owner_kind="{kind}",owner_name="{name}",owner_is_controller="true"}} 1\n'
    phase = "Running" if node else "Pending"
    yield f'kube_pod_status_phase{{{pod},phase="{phase}"}} 1\n'
    if not node:
        yield f'kube_pod_status_scheduled{{{pod},condition="false"}} 1\n'
    for resource, count in member.spec.containers[0].limits.items():
        if resource not in (VGPU.memory, MPS.memory):
            labels = f'{pod},container="main",node="{node}",resource="{_kube(resource)}"'
            yield f"kube_pod_container_resource_requests{{{labels}}} {count}\n"
