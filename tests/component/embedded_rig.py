"""The scenario suite's rig on the embedded kubelet: the agent a real process, the kubelet in the test's."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread
import grpc
import pytest

from agent.simulator.kubelet import EmbeddedKubelet, Phase, PodSpec, Timings
from agent.simulator.kubelet.http_api import HttpApi
from agent.simulator.kubelet.resource_objects import KINDS
from agent.simulator.machine import SimulatedMachine
from tests.cluster import toolkit
from tests.cluster.agent_process import AgentProcess
from tests.component.kubelet.peer import PodResources, pod_resources
from tests.pace import scaled
from tests.scenarios.rig import GPU, Claimed, NodeView
from tests.scenarios.rig_base import RigBase

T = TypeVar("T")
Face = Literal["1.37", "1.36", "1.33"]
FACES: tuple[Face, ...] = ("1.36", "1.33")
# All that they differ in is that 1.33 also lists pods that have finished. Where that is not the scenario's
# subject, it has time for one of them.
MOSTLY_THE_NEWEST = (FACES[0], pytest.param(FACES[1], marks=pytest.mark.long))
PROFILE = "dgx-h200"
RESTART_SECONDS = 30.0
QUICK = Timings(registry_poll=0.2, wiping=2.0, terminate_retry=1.0)
COLLECTIONS = {kind: collection for collection, kind in KINDS.items()}
FIRST_PID = 5_000_000  # beyond the kernel's own


class EmbeddedRig(RigBase):
    """See `tests.scenarios.rig.Rig`. Made by `embedded_rig`."""

    def __init__(self, folder: Path, face: Face, status_tick: float, timings: Timings) -> None:
        """Blocks: it writes the node's files."""
        machine = SimulatedMachine.create(PROFILE, folder / "machine")
        arguments = [f"--simulated-machine={folder / 'machine'}"]
        super().__init__(folder, machine, AgentProcess(folder, {}, lambda _: None, arguments))
        self.kubelet = EmbeddedKubelet(
            folder / "k",
            pod_resources_face=face,
            status_tick=status_tick,
            # A plugin that is served late on a busy machine still wins the race against the first status.
            timings=replace(timings, first_status=scaled(4 * timings.first_status)),
            cdi_folder=folder / "cdi",
        )
        self.http = HttpApi(self.kubelet.api)
        self.node_name = self.kubelet.api.node_name
        self.kubelet_root = self.kubelet.root
        self.cdi_folder = folder / "cdi"
        self.wiping_seconds = timings.wiping
        self.watch_seconds = 1.0 + 2 * status_tick
        (folder / "cdi").mkdir()
        toolkit.write_cdi_spec(folder / "cdi", folder, self._minors)
        self._pids: dict[tuple[str, str], int] = {}  # pod UID, container

    # The agent

    def _settings(self) -> dict[str, object]:
        return super()._settings() | {
            "kubelet.root": str(self.kubelet.root),
            "host.proc": str(self._folder / "proc"),
            "host.cdi": str(self._folder / "cdi"),
        }

    async def api_access(self) -> Mapping[str, object]:
        kubeconfig = self._folder / "kubeconfig"
        await anyio.to_thread.run_sync(self.http.write_kubeconfig, kubeconfig)
        return {
            "cluster.access": "required",
            "cluster.kubeconfig": str(kubeconfig),
            "cluster.nodeName": self.kubelet.api.node_name,
        }

    # The node

    async def allocatable(self, resource: str = GPU) -> int | None:
        return self.kubelet.allocatable.get(resource)

    async def capacity(self, resource: str = GPU) -> int | None:
        return self.kubelet.capacity.get(resource)

    async def wait_allocatable(self, count: int, resource: str = GPU, deadline: float = 30.0) -> None:
        amounts = self.kubelet.api
        await self._wait(
            # The agent patches the status ahead of the kubelet, which takes a while here to read a long list.
            lambda: amounts.allocatable.get(resource) == count == self.kubelet.known_devices(resource),
            deadline,
            lambda: f"allocatable {resource} is {amounts.allocatable.get(resource)}, not {count}",
        )

    async def known_devices(self, resource: str = GPU) -> int:
        return self.kubelet.known_devices(resource)

    @asynccontextmanager
    async def watching_allocatable(self, resource: str = GPU) -> AsyncIterator[Sequence[int | None]]:
        with self._watching(resource) as values:
            yield values

    @contextmanager
    def _watching(self, resource: str) -> Iterator[list[int | None]]:
        values = [self.kubelet.allocatable.get(resource)]

        def look(_: Mapping[str, int], allocatable: Mapping[str, int]) -> None:
            if (now := allocatable.get(resource)) != values[-1]:
                values.append(now)

        with self.kubelet.observing_node(look):
            yield values

    async def set_labels(self, labels: Mapping[str, str | None]) -> None:
        for key, value in labels.items():
            self.http.set_label(key, value)

    async def node(self) -> NodeView:
        conditions = {
            kind: (each["status"], each["reason"], each["message"])
            for kind, each in self.http.conditions.items()
        }
        taints = frozenset(each["key"] for each in self.kubelet.api.taints)
        return NodeView(dict(self.http.labels), dict(self.http.annotations), conditions, taints)

    async def event_reasons(self) -> Sequence[str]:
        return [each["reason"] for each in self.http.events if each["involvedObject"]["kind"] == "Node"]

    @asynccontextmanager
    async def api_server_away(self) -> AsyncIterator[None]:
        self.http.reachable = False
        try:
            yield
        finally:
            self.http.reachable = True

    async def restart_kubelet(self, down_seconds: float = 0.0) -> None:
        before = await self._ask(lambda lister: len(lister.allocatable()))
        await self.kubelet.restart(down_seconds)
        with anyio.fail_after(RESTART_SECONDS):
            while await self._ask(lambda lister: len(lister.allocatable())) < before:
                await anyio.sleep(0.02)

    # Pods

    async def create_pod(self, pod: PodSpec) -> None:
        self.kubelet.create_pod(pod)

    async def delete_pod(self, pod: PodSpec, deadline: float = 30.0) -> None:
        await self.kubelet.delete_pod(pod, deadline)

    async def phase(self, pod: PodSpec) -> Phase:
        return self.kubelet.pod(pod).phase

    async def all_pods(self) -> Mapping[str, tuple[Phase, str, str]]:
        pods = self.kubelet.api.pods.values()
        return {pod.spec.name: (pod.phase, pod.reason, pod.message) for pod in pods}

    async def ask_to_delete(self, pod: PodSpec) -> None:
        if pod.key in self.kubelet.api.pods:
            self.kubelet.api.delete(pod)

    async def wait_phase(self, pod: PodSpec, phase: Phase, deadline: float = 30.0) -> None:
        seen = self.kubelet.pod(pod)

        def reached() -> bool:
            told = f"pod {pod.name} is {seen.phase}, not {phase}: {seen.reason} {seen.message}"
            assert seen.phase is phase or not seen.phase.finished, told
            return seen.phase is phase

        await self._wait(reached, deadline, lambda: f"pod {pod.name} is {seen.phase}: {seen}")

    async def wait_running(self, pod: PodSpec, container: str, deadline: float = 30.0) -> None:
        seen = self.kubelet.pod(pod)
        await self._wait(
            lambda: self.kubelet.runs(pod, container), deadline, lambda: f"{container} does not run: {seen}"
        )

    async def reason(self, pod: PodSpec) -> str:
        return self.kubelet.pod(pod).reason

    async def message(self, pod: PodSpec) -> str:
        return self.kubelet.pod(pod).message

    async def held_ids(self, pod: PodSpec, container: str, resource: str = GPU) -> frozenset[str]:
        answer: Any = await self._get(pod)
        containers = answer.containers if answer else ()
        devices = [item for each in containers if each.name == container for item in each.devices]
        return frozenset(one for item in devices if item.resource_name == resource for one in item.device_ids)

    async def _get(self, pod: PodSpec) -> Any:
        try:
            return await self._ask(lambda lister: lister.get(pod.name, pod.namespace))
        except grpc.RpcError as error:
            # A kubelet that was restarted may not have taken the pod up again yet.
            if "not found" in str(error.details()):
                return None
            raise

    async def container_environment(self, pod: PodSpec, container: str) -> Mapping[str, str]:
        return self.kubelet.container(pod, container).env

    async def container_device_nodes(self, pod: PodSpec, container: str) -> frozenset[str]:
        nodes = self.kubelet.container(pod, container).device_nodes
        return frozenset(node for node in nodes if node.startswith("/dev/nvidia"))

    async def container_pid(self, pod: PodSpec, container: str) -> int:
        """Containers here have no processes: what /proc would say of one is written down."""
        found = self.kubelet.pod(pod)
        pid = self._pids.setdefault((found.uid, container), FIRST_PID + len(self._pids))
        folder = self._folder / "proc" / str(pid)
        cgroup = f"0::/kubepods/burstable/pod{found.uid}/{found.container_id(container)}\n"
        await anyio.to_thread.run_sync(_write, folder / "cgroup", cgroup)
        return pid

    # Claims

    async def create_resource(self, kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.kubelet.api.resources.create(COLLECTIONS[kind], item)

    async def resources(self, kind: str) -> Sequence[Mapping[str, Any]]:
        return list(self.kubelet.api.resources.of(COLLECTIONS[kind]))

    async def annotate_pod(self, pod: PodSpec, key: str, value: str) -> None:
        self.kubelet.pod(pod).written[key] = value
        self.kubelet.api.changed()

    async def claimed(self, pod: PodSpec, container: str) -> Sequence[Claimed]:
        answer: Any = await self._get(pod)
        return [
            Claimed(claim.claim_name, each.device_name, each.share_id if each.HasField("share_id") else None)
            for found in (answer.containers if answer else ())
            if found.name == container
            for claim in found.dynamic_resources
            for each in claim.claim_resources
        ]

    # Inner

    async def _wait(self, reached: Callable[[], bool], deadline: float, seen: Callable[[], str]) -> None:
        deadline = scaled(deadline)
        end = anyio.current_time() + deadline
        while True:
            left = end - anyio.current_time()
            try:
                await self.kubelet.wait_for(reached, min(left, 0.5), seen)
            except TimeoutError as error:
                died = self.agent.crashed
                if left > 0.5 and not died:
                    continue
                log = await anyio.to_thread.run_sync(partial(self.agent.log.read_text, errors="replace"))
                told = "the agent has ended by itself" if died else f"after {deadline:g} s"
                raise TimeoutError(f"{seen()}; {told}; end of its log:\n{log[-2000:]}") from error
            return

    async def _ask(self, question: Callable[[PodResources], T]) -> T:
        """One question to PodResources; its rate limit, shared with the agent, is waited out."""

        def call() -> T:
            with pod_resources(self.kubelet.pod_resources_socket) as lister:
                return question(lister)

        for _ in range(100):
            try:
                return await anyio.to_thread.run_sync(call)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await anyio.sleep(0.02)
        raise TimeoutError("PodResources refuse for want of calls per second, 100 times in a row")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@asynccontextmanager
async def embedded_rig(
    face: Face = "1.36", status_tick: float = 0.5, timings: Timings = QUICK
) -> AsyncIterator[EmbeddedRig]:
    """A fresh node, gone with everything on it at the end. For the test's body, not for a fixture."""
    folder = Path(await anyio.mkdtemp(prefix="gna-"))
    try:
        rig = await anyio.to_thread.run_sync(EmbeddedRig, folder, face, status_tick, timings)
        async with rig.kubelet.running(), rig.http.serving():
            try:
                yield rig
            finally:
                with anyio.CancelScope(shield=True):
                    await rig.kill_agent()
    finally:
        shutil.rmtree(folder)
