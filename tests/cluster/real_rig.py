"""The scenario suite's rig on the real cluster: real kubelet and runtime, the agent beside them."""

import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent._proto import v1
from agent.simulator.kubelet.pod_specs import Phase, PodSpec
from agent.simulator.machine import SimulatedMachine
from tests.cluster import toolkit
from tests.cluster.agent_process import AgentProcess
from tests.cluster.api import ApiError
from tests.cluster.build.cache import cache_root
from tests.cluster.node_reset import forget_resources
from tests.cluster.node_watch import watching
from tests.cluster.rig_node import RigNode
from tests.cluster.running import asked, process_in
from tests.cluster.scenario_pods import Report, manifest, read_report, templates, waiting_of
from tests.nvml_double.build import STATE_VARIABLE, build
from tests.pace import scaled
from tests.scenarios.rig import GPU, Claimed, NodeView
from tests.scenarios.rig_base import RigBase

T = TypeVar("T")
PROFILE = "dgx-h200"
POLL = 0.05
REPORT_SECONDS = 15.0
PODRESOURCES_SECONDS = 30.0
API_SECONDS = 60.0
WIPING_SECONDS = 30.0
RESOURCES = "resource.k8s.io/v1"


class RealRig(RigBase):
    """One scenario's view of the cluster. Made by `real_rig`, which also cleans up after it."""

    def __init__(self, cluster: RigNode, folder: Path, run: Path, profile: str) -> None:
        machine = SimulatedMachine.create(profile, folder / "machine")
        environment = {STATE_VARIABLE: str(folder / "machine")}
        super().__init__(folder, machine, AgentProcess(folder, environment, cluster.adopt))
        self._cluster = cluster
        self._run = run
        self._pods: list[PodSpec] = []
        self._resources: list[tuple[str, str, str]] = []  # kind, namespace and name
        self._labels: set[str] = set()
        self.node_name = cluster.node
        self.kubelet_root = cluster.kubelet_root
        self.cdi_folder = cluster.cdi_dir
        self.wiping_seconds = WIPING_SECONDS
        self.watch_seconds = 5.0
        machine.write_sysfs(folder / "sys")
        toolkit.make_device_nodes(folder, self._minors)
        toolkit.write_cdi_spec(cluster.cdi_dir, folder, self._minors)
        self.library = build(cache_root() / "nvml")

    @property
    def folder(self) -> Path:
        """The machine's: device nodes, files of the driver, and the agent's own folders lie below."""
        return self._folder

    @property
    def run_folder(self) -> Path:
        """The agent's `host.run`."""
        return self._run

    @property
    def driver_version(self) -> str:
        return self.machine.profile.driver_version

    # The agent

    def _settings(self) -> dict[str, object]:
        return super()._settings() | {
            "kubelet.root": str(self._cluster.kubelet_root),
            "driver.library": str(self.library),
            "host.sysfs": str(self._folder / "sys"),
            "host.cdi": str(self._cluster.cdi_dir),
            "host.run": str(self._run),
        }

    async def api_access(self) -> Mapping[str, object]:
        return {
            "cluster.access": "required",
            "cluster.kubeconfig": str(self._cluster.kubeconfig),
            "cluster.nodeName": self._cluster.node,
        }

    # The node

    async def allocatable(self, resource: str = GPU) -> int | None:
        return await self._amount("allocatable", resource)

    async def capacity(self, resource: str = GPU) -> int | None:
        return await self._amount("capacity", resource)

    async def wait_allocatable(self, count: int, resource: str = GPU, deadline: float = 30.0) -> None:
        async def reached() -> bool:
            return await self.allocatable(resource) == count

        async def seen() -> str:
            return f"allocatable {resource} is {await self.allocatable(resource)}, not {count}"

        await self._wait(reached, deadline, seen)

    @asynccontextmanager
    async def watching_allocatable(self, resource: str = GPU) -> AsyncIterator[Sequence[int | None]]:
        async with watching(self._cluster, "allocatable", resource) as values:
            yield values

    async def set_labels(self, labels: Mapping[str, str | None]) -> None:
        self._labels |= set(labels)
        path = self._cluster.api.path("v1", "Node", None, self._cluster.node)
        patch = {"metadata": {"labels": dict(labels)}}
        await self._blocking(partial(self._cluster.api.merge_patch, path, patch))

    async def node(self) -> NodeView:
        node = await self._blocking(partial(self._cluster.get, "Node", self._cluster.node))
        conditions = {
            each["type"]: (each["status"], each["reason"], each["message"])
            for each in node["status"].get("conditions", ())
        }
        metadata = node["metadata"]
        taints = frozenset(each["key"] for each in node["spec"].get("taints") or ())
        return NodeView(metadata["labels"], metadata["annotations"], conditions, taints)

    async def event_reasons(self) -> Sequence[str]:
        api = self._cluster.api
        path = api.path("v1", "Event", "default")
        found = await self._blocking(partial(api.get, path, fieldSelector="involvedObject.kind=Node"))
        return [
            each["reason"] for each in sorted(found["items"], key=lambda each: each["firstTimestamp"] or "")
        ]

    @asynccontextmanager
    async def api_server_away(self) -> AsyncIterator[None]:
        await self._blocking(partial(self._cluster.stop, "api"))
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._blocking(partial(self._cluster.start, "api"))
                await self._wait(self._api_answers, API_SECONDS, self._api_seen)

    async def _api_answers(self) -> bool:
        try:
            await self._blocking(partial(self._cluster.api.request, "GET", "/readyz", timeout=2))
        except (OSError, ApiError):
            return False
        return True

    async def _api_seen(self) -> str:
        return f"the API server is not back; end of its log:\n{self._cluster.log_tail('api')}"

    async def known_devices(self, resource: str = GPU) -> int:
        answer = await self._ask(lambda stub: stub.get_allocatable_resources(timeout=2))
        return sum(len(item.device_ids) for item in answer.devices if item.resource_name == resource)

    async def restart_kubelet(
        self, down_seconds: float = 0.0, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        before = await self._known_devices()
        await self._blocking(partial(self._cluster.restart_kubelet, down_seconds, meanwhile))
        await self._wait_known_devices(before)

    # Pods

    async def create_pod(self, pod: PodSpec) -> None:
        self._pods.append(pod)
        for template in templates(pod):
            await self.create_resource(template["kind"], template)
        await self._blocking(partial(self._cluster.apply, manifest(pod, self._cluster.node)))

    async def delete_pod(self, pod: PodSpec, deadline: float = 30.0) -> None:
        # A grace of 0 would make the API forget the pod while its containers may still run.
        delete = partial(self._cluster.delete, "Pod", pod.name, namespace=pod.namespace)
        await self._blocking(partial(delete, grace_seconds=1, timeout=deadline))

    async def phase(self, pod: PodSpec) -> Phase:
        return Phase((await self._status(pod))["phase"])

    async def all_pods(self) -> Mapping[str, tuple[Phase, str, str]]:
        api = self._cluster.api
        found = await self._blocking(partial(api.get, api.path("v1", "Pod", "default")))
        return {
            each["metadata"]["name"]: (
                Phase(each["status"]["phase"]),
                each["status"].get("reason", ""),
                " ".join((each["status"].get("message", ""), waiting_of(each))).strip(),
            )
            for each in found["items"]
        }

    async def ask_to_delete(self, pod: PodSpec) -> None:
        api = self._cluster.api
        path = api.path("v1", "Pod", pod.namespace, pod.name)
        try:
            await self._blocking(partial(api.delete, path, grace_seconds=1))
        except ApiError as error:
            if error.status != 404:
                raise

    async def wait_phase(self, pod: PodSpec, phase: Phase, deadline: float = 30.0) -> None:
        async def reached() -> bool:
            status = await self._status(pod)
            now = Phase(status["phase"])
            if now is not phase and now.finished:
                logs = f"{self.agent.log_tail()}\nand of the kubelet's:\n{self._cluster.log_tail('kubelet')}"
                told = f"pod {pod.name} is {now}, not {phase}: {status}; end of the agent's log:\n{logs}"
                raise AssertionError(told)
            return now is phase

        async def seen() -> str:
            events = await self._blocking(partial(self._cluster.events, pod.name, namespace=pod.namespace))
            return f"pod {pod.name} is {await self.phase(pod)}, not {phase}; events: {events}"

        await self._wait(reached, deadline, seen)

    async def wait_running(self, pod: PodSpec, container: str, deadline: float = 30.0) -> None:
        async def reached() -> bool:
            status = await self._status(pod)
            told = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
            return any(each["name"] == container and "running" in each["state"] for each in told)

        async def seen() -> str:
            return f"container {container} of pod {pod.name} does not run: {await self._status(pod)}"

        await self._wait(reached, deadline, seen)

    async def reason(self, pod: PodSpec) -> str:
        return await self._why(pod, "reason")

    async def message(self, pod: PodSpec) -> str:
        return await self._why(pod, "message")

    async def held_ids(self, pod: PodSpec, container: str, resource: str = GPU) -> frozenset[str]:
        containers = await self._containers(pod)
        devices = [item for each in containers if each.name == container for item in each.devices]
        return frozenset(id_ for item in devices if item.resource_name == resource for id_ in item.device_ids)

    async def _containers(self, pod: PodSpec) -> Sequence[v1.ContainerResources]:
        request = v1.GetPodResourcesRequest(pod_name=pod.name, pod_namespace=pod.namespace)
        try:
            answer = await self._ask(lambda stub: stub.get(request, timeout=5))
        except GRPCError as error:
            # A kubelet that was restarted may not have taken the pod up again yet.
            if "not found" in (error.message or ""):
                return ()
            raise
        return answer.pod_resources.containers if answer.pod_resources else ()

    async def container_environment(self, pod: PodSpec, container: str) -> Mapping[str, str]:
        return (await self._report(pod, container)).environment

    async def container_device_nodes(self, pod: PodSpec, container: str) -> frozenset[str]:
        return (await self._report(pod, container)).device_nodes

    async def container_pid(self, pod: PodSpec, container: str) -> int:
        status = await self._status(pod)
        named = {each["name"]: each["containerID"] for each in status["containerStatuses"]}
        return await self._blocking(partial(process_in, named[container].rpartition("/")[2]))

    # Claims

    async def create_resource(self, kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        metadata = item["metadata"]
        self._resources.append((kind, metadata.get("namespace", "default"), metadata["name"]))
        return await self._blocking(
            partial(self._cluster.apply, {**item, "apiVersion": RESOURCES, "kind": kind})
        )

    async def resources(self, kind: str) -> Sequence[Mapping[str, Any]]:
        return await self._blocking(
            partial(self._cluster.find_all, kind, namespace="default", api_version=RESOURCES)
        )

    async def annotate_pod(self, pod: PodSpec, key: str, value: str) -> None:
        path = self._cluster.api.path("v1", "Pod", pod.namespace, pod.name)
        patch = {"metadata": {"annotations": {key: value}}}
        await self._blocking(partial(self._cluster.api.merge_patch, path, patch))

    async def claimed(self, pod: PodSpec, container: str) -> Sequence[Claimed]:
        return [
            Claimed(claim.claim_name, each.device_name, each.share_id)
            for found in await self._containers(pod)
            if found.name == container
            for claim in found.dynamic_resources
            for each in claim.claim_resources
        ]

    # Before and after

    async def clean_up(self) -> None:
        """Leave the node as a new one: no agent, no pod, no CDI specification, no memory of the resources."""
        await self.agent.end(signal.SIGKILL, 5)
        async with anyio.create_task_group() as group:
            for pod in self._pods:
                group.start_soon(self.delete_pod, pod)
        for kind, namespace, name in dict.fromkeys(self._resources):
            delete = partial(self._cluster.delete, kind, name, api_version=RESOURCES)
            await self._blocking(partial(delete, namespace=namespace))
        await self._blocking(partial(forget_resources, self._cluster, self._labels))
        await self._wait_known_devices(0)

    # Inner

    async def _blocking(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call)

    async def _wait(
        self,
        reached: Callable[[], Awaitable[bool]],
        deadline: float,
        seen: Callable[[], Awaitable[str]],
    ) -> None:
        with anyio.move_on_after(scaled(deadline)):
            while not await reached():
                self.agent.assert_not_crashed()
                await anyio.sleep(POLL)
            return
        raise TimeoutError(
            f"{await seen()} after {deadline:g} s; end of the agent's log:\n{self.agent.log_tail()}"
        )

    async def _amount(self, part: str, resource: str) -> int | None:
        node = await self._blocking(partial(self._cluster.get, "Node", self._cluster.node))
        value = node["status"].get(part, {}).get(resource)
        return None if value is None else int(value)

    async def _status(self, pod: PodSpec) -> dict[str, Any]:
        found = await self._blocking(partial(self._cluster.get, "Pod", pod.name, namespace=pod.namespace))
        status: dict[str, Any] = found["status"]
        return status

    async def _why(self, pod: PodSpec, key: str) -> str:
        status = await self._status(pod)
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get(key, ""))
        return str(status.get(key, ""))

    async def _report(self, pod: PodSpec, container: str) -> Report:
        log = partial(self._cluster.logs, pod.name, container, namespace=pod.namespace)
        with anyio.move_on_after(REPORT_SECONDS):
            while (report := read_report(await self._blocking(log))) is None:
                await anyio.sleep(POLL)
            return report
        raise TimeoutError(
            f"container {container} of pod {pod.name} reports nothing after {REPORT_SECONDS} s"
        )

    async def _known_devices(self) -> int:
        """How many device IDs the kubelet may hand out, held ones included."""
        answer = await self._ask(lambda stub: stub.get_allocatable_resources(timeout=2))
        return sum(len(item.device_ids) for item in answer.devices)

    async def _wait_known_devices(self, count: int) -> None:
        async def known() -> bool:
            try:
                return await self._known_devices() == count
            except (OSError, GRPCError, StreamTerminatedError):
                return False

        async def seen() -> str:
            log = self._cluster.log_tail("kubelet")
            return f"PodResources do not show {count} devices; end of the kubelet's log:\n{log}"

        await self._wait(known, PODRESOURCES_SECONDS, seen)

    async def _ask(self, call: Callable[[v1.PodResourcesListerStub], Awaitable[T]]) -> T:
        return await asked(self._cluster.podresources_socket, call)


@asynccontextmanager
async def real_rig(cluster: RigNode, profile: str = PROFILE) -> AsyncIterator[RealRig]:
    """A rig on a node without agent, pods and GPUs; afterwards the node is so again."""
    with (
        tempfile.TemporaryDirectory(prefix="rig-", dir=cluster.layout.root) as folder,
        tempfile.TemporaryDirectory(prefix="gr-") as run,  # a path with room for the sockets of MPS
    ):
        rig = await anyio.to_thread.run_sync(RealRig, cluster, Path(folder), Path(run), profile)
        try:
            yield rig
        finally:
            with anyio.CancelScope(shield=True):
                await rig.clean_up()
