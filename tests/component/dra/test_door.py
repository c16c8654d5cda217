"""The agent's DRA door on the embedded kubelet: the agent a real process, slices and claims over HTTP."""

import copy
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.model.modes import SHARES, WHOLE_GPUS, Mode
from agent.model.resource_claim import DRIVER, WORDS, device_name
from agent.simulator.kubelet import Pod
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodClaim, PodSpec
from agent.web.control import NAME, ask
from tests.component.embedded_rig import QUICK, EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.agent_face import metric
from tests.scenarios.mps import MpsNode, node_to_be
from tests.scenarios.rig import GPU


@asynccontextmanager
async def a_node(resync: float = 5.0) -> AsyncIterator[MpsNode]:
    """A node with classes of devices, and no agent yet."""
    # A prepare that failed is tried again after a minute or more: here soon.
    quick = replace(QUICK, resync=resync)
    async with embedded_rig("1.37", timings=quick) as rig, node_to_be(rig) as node:
        for mode in (WHOLE_GPUS, SHARES):
            await rig.create_resource("DeviceClass", device_class(mode))
        yield node


@asynccontextmanager
async def dra_node(**settings: object) -> AsyncIterator[MpsNode]:
    """A node whose GPUs are all devices of DRA."""
    async with a_node() as node:
        rig = rig_of(node)
        await start(node, **settings)
        await offered(rig)
        yield node


async def start(node: MpsNode, **settings: object) -> None:
    await anyio.to_thread.run_sync(node.mode_file.write_text, "dra\n")
    await node.rig.start_agent(await node.settings(**{"dra.enabled": True, **settings}))


def rig_of(node: MpsNode) -> EmbeddedRig:
    assert isinstance(node.rig, EmbeddedRig)
    return node.rig


async def offered(rig: EmbeddedRig, gpus: int = 8) -> None:
    """Wait until so many GPUs take claims."""
    await until(rig, lambda found: sum(not each.get("taints") for each in found) == 2 * gpus)


def device_class(mode: Mode) -> Mapping[str, Any]:
    word = WORDS[mode]
    cel = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].mode == '{word}'"
    return {"metadata": {"name": f"gpu-{word}"}, "spec": {"selectors": [{"cel": {"expression": cel}}]}}


def asking(name: str, mode: Mode, cores: int = 0, gib: int = 0, count: int = 1, **more: Any) -> PodSpec:
    exact: dict[str, Any] = {"deviceClassName": f"gpu-{WORDS[mode]}", "count": count, **more}
    if cores:
        exact["capacity"] = {"requests": {"cores": str(cores), "memory": f"{gib}Gi"}}
    claim = {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}
    return PodSpec(name, (ContainerSpec("main", claims=("gpu",)),), claims=(PodClaim("gpu", template=claim),))


def devices(rig: EmbeddedRig) -> list[Mapping[str, Any]]:
    found = [each["spec"] for each in rig.kubelet.api.resources.of("resourceslices")]
    return [device for spec in found if spec["driver"] == DRIVER for device in spec.get("devices") or ()]


async def until(rig: EmbeddedRig, reached: Any, seconds: float = 20.0) -> None:
    end = anyio.current_time() + scaled(seconds)
    while not reached(devices(rig)):
        if anyio.current_time() > end or rig.agent.crashed:
            raise TimeoutError(f"{devices(rig)[:2]}; {rig.agent_log().read_text()[-6000:]}")
        await anyio.sleep(0.02)


async def run(rig: EmbeddedRig, *pods: PodSpec) -> None:
    for pod in pods:
        await rig.create_pod(pod)
    for pod in pods:
        try:
            await rig.wait_phase(pod, Phase.RUNNING, 15)
        except TimeoutError as error:
            raise TimeoutError(f"{rig.kubelet.pod(pod).claims_fault}; {error}") from error


async def test_first_claim_chooses_and_last_one_frees() -> None:
    async with dra_node() as node:
        rig = rig_of(node)
        one, other = asking("one", SHARES, 30, 40), asking("other", SHARES, 45, 60)
        await run(rig, one, other)
        first = rig.gpu_uuids()[0]
        for pod, cores, gib in ((one, "30", "40"), (other, "45", "60")):
            environment = await rig.container_environment(pod, "main")
            assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == cores
            assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={gib}G"
            assert [each.device for each in await rig.claimed(pod, "main")] == [device_name(first, SHARES)]
        status = await status_of(node)
        gpu = status["gpus"][0]
        assert (gpu["mode"]["active"], gpu["mode"]["door"]) == ("mps", "dra")
        assert gpu["mps"]["state"] == "serving"
        held = {each["pod"]: each["units"] for each in gpu["holders"]}
        assert held["default/one"] == {"nvidia.com/mps-core": 30, "nvidia.com/mps-memory": 40}
        await shows_claims(node)
        wholes = [asking(f"whole-{n}", WHOLE_GPUS) for n in range(7)]
        await run(rig, *wholes)
        late = asking("late", WHOLE_GPUS)
        await rig.create_pod(late)
        await rig.delete_pod(one)
        await anyio.sleep(0.5)
        assert await rig.phase(late) is Phase.PENDING
        await rig.delete_pod(other)
        await rig.wait_phase(late, Phase.RUNNING)
        assert not [gpu for gpu in (await status_of(node))["gpus"] if gpu["mps"]]


async def shows_claims(node: MpsNode) -> None:
    """`top`, metrics and the annotation of holders have claims where they have units."""
    rig = rig_of(node)
    shares: dict[str, tuple[str, float]] = {}
    with anyio.fail_after(scaled(20)):
        while shares != {"one": ("mps", 0.3), "other": ("mps", 0.45)}:  # with a round of figures
            await anyio.sleep(0.05)
            document = await anyio.to_thread.run_sync(ask, node.run / NAME, "top")
            shares = {each["pod"]: (each["mode"], each["coreLimitRatio"]) for each in document["containers"]}
    assert await metric(rig, "gpu_agent_dra_open") == 1
    assert await metric(rig, "gpu_agent_dra_claims") == 2
    assert await metric(rig, r'gpu_agent_dra_prepares_total{outcome="prepared"}') == 2
    assert await metric(rig, "gpu_agent_dra_prepare_seconds_total") > 0
    assert await metric(rig, r'gpu_agent_dra_slice_writes_total{result="ok"}') >= 2
    assert await metric(rig, "gpu_agent_dra_nudges_total") == 0
    assert await metric(rig, r'gpu_agent_free_gpus{mode="dra"}') == 7
    assert await metric(rig, r'gpu_agent_free_compute_gpus{mode="dra"}') == 7.25
    first = rig.gpu_uuids()[0]
    await seen(lambda: len(noted(rig, first)) == 2)
    assert sorted(each[1:] for each in noted(rig, first)) == [[30, 40], [45, 60]]


def noted(rig: EmbeddedRig, gpu: str) -> list[list[Any]]:
    """Holders of a GPU by the node's annotation: a digest, cores, GiB."""
    note = json.loads(rig.http.annotations.get("gpu-node-agent.io/holders", "{}"))
    found: list[list[Any]] = note.get("gpus", {}).get(gpu, {}).get("h", [])
    return found


async def status_of(node: MpsNode) -> Mapping[str, Any]:
    document: Mapping[str, Any] = await anyio.to_thread.run_sync(ask, node.run / NAME, "status")
    return document


def slices(rig: EmbeddedRig) -> list[Mapping[str, Any]]:
    return [
        each for each in rig.kubelet.api.resources.of("resourceslices") if each["spec"]["driver"] == DRIVER
    ]


def taints(rig: EmbeddedRig, uuid: str, mode: Mode) -> list[tuple[str, str]]:
    (device,) = (each for each in devices(rig) if each["name"] == device_name(uuid, mode))
    return [(each["key"].rpartition("/")[2], each["value"]) for each in device.get("taints") or ()]


async def seen(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    with anyio.fail_after(scaled(seconds)):
        while not condition():
            await anyio.sleep(0.02)


ONE = {"layouts": {"one": [{"gpus": [0], "mode": "dra"}, {"gpus": ["rest"], "mode": "pgpu"}]}}


@asynccontextmanager
async def one_device(resync: float = 5.0, **settings: object) -> AsyncIterator[tuple[MpsNode, EmbeddedRig]]:
    """A node of two doors: GPU 0 is a device of DRA, the others are nvidia.com/gpu."""
    async with a_node(resync) as node:
        rig = rig_of(node)
        await anyio.to_thread.run_sync(node.mode_file.write_text, "one\n")
        await rig.start_agent(await node.settings(**{"dra.enabled": True, **ONE, **settings}))
        await offered(rig, 1)
        await rig.wait_allocatable(7)
        yield node, rig


async def test_two_doors_and_a_gpu_that_moves_between_them() -> None:
    async with one_device() as (node, rig):
        share = asking("share", SHARES, 10, 10)
        await run(rig, share)
        plain = PodSpec("plain", (ContainerSpec("main", {GPU: 7}),))
        await run(rig, plain)
        assert rig.gpu_uuids()[0] not in await rig.held_ids(plain, "main")
        await anyio.to_thread.run_sync(node.mode_file.write_text, "pgpu\n")
        first = rig.gpu_uuids()[0]
        await seen(lambda: taints(rig, first, SHARES) == [("unavailable", "leaving")])
        for each in slices(rig):  # as a kubelet that restarts does
            rig.kubelet.api.resources.delete("resourceslices", ("", each["metadata"]["name"]))
        await seen(lambda: bool(devices(rig)) and taints(rig, first, SHARES) == [("unavailable", "leaving")])
        late = asking("late", WHOLE_GPUS)
        await rig.create_pod(late)
        await anyio.sleep(1)
        assert await rig.phase(share) is Phase.RUNNING
        assert await rig.allocatable() == 7
        await rig.delete_pod(share)
        await rig.wait_allocatable(8)
        await seen(lambda: not slices(rig))
        assert await rig.phase(late) is Phase.PENDING
        await anyio.to_thread.run_sync(node.mode_file.write_text, "one\n")
        await rig.wait_phase(late, Phase.RUNNING)
        assert await rig.allocatable() == 7


async def test_slices_are_put_back_and_foreign_ones_replaced() -> None:
    async with one_device() as (_, rig):
        resources = rig.kubelet.api.resources
        for each in slices(rig):
            resources.delete("resourceslices", ("", each["metadata"]["name"]))
        await offered(rig, 1)
        strange: dict[str, Any] = copy.deepcopy(dict(slices(rig)[0]))
        strange["metadata"] = {"name": "strange"}
        strange["spec"]["pool"]["name"] = "strange"
        resources.create("resourceslices", strange)
        await seen(lambda: {each["metadata"]["name"] for each in slices(rig)}.isdisjoint({"strange"}))
        await seen(lambda: "ForeignSlice" in {each["reason"] for each in rig.http.events})
        whole = asking("whole", WHOLE_GPUS)
        await run(rig, whole)


@pytest.mark.parametrize("why", ["gate", "version"])
async def test_a_cluster_without_what_it_takes_is_refused(why: str) -> None:
    async with a_node() as node:
        rig = rig_of(node)
        rig.kubelet.api.resources.dropped = frozenset({"consumesCounters"} if why == "gate" else ())
        rig.http.resources.version = "v1.37.2" if why == "gate" else "v1.36.3"
        await anyio.to_thread.run_sync(node.mode_file.write_text, "one\n")
        await rig.start_agent(await node.settings(**{"dra.enabled": True, **ONE}))
        await rig.wait_allocatable(7)
        await seen(lambda: "DRARefused" in {each["reason"] for each in rig.http.events})
        (event,) = (each for each in rig.http.events if each["reason"] == "DRARefused")
        word = "DRAPartitionableDevices" if why == "gate" else "needs Kubernetes 1.36.5"
        assert word in event["message"]
        assert not slices(rig)
        assert any(word in each for each in (await status_of(node))["problems"])


LONG_SECONDS = 600.0  # more than a test takes on any machine


def end(rig: EmbeddedRig, pod: Pod) -> None:
    """The processes of a pod that was deleted by force end now."""
    assert rig.kubelet._life
    rig.kubelet._life._end_removed(pod)


async def test_killed_agent_keeps_claims_and_waits_for_forced_deletions() -> None:
    """The kubelet's record says who holds what, though the pod is gone and its agent was killed."""
    async with one_device() as (node, rig):
        share = replace(asking("share", SHARES, 60, 60), grace=LONG_SECONDS)
        await run(rig, share)
        daemon, pod = await node.pids(), rig.kubelet.pod(share)
        await rig.kill_agent()
        rig.kubelet.api.delete_by_force(share)
        await rig.start_agent(await node.settings(**{"dra.enabled": True, **ONE}))
        whole = asking("whole", WHOLE_GPUS)
        await rig.create_pod(whole)
        await seen(lambda: any("allocation" in (each.get("status") or {}) for each in claims(rig)))
        await anyio.sleep(2)
        assert await rig.phase(whole) is Phase.PENDING
        assert await node.pids() == daemon
        end(rig, pod)
        await rig.wait_phase(whole, Phase.RUNNING, 40)
        assert not await node.pids()


def claims(rig: EmbeddedRig) -> list[Mapping[str, Any]]:
    return list(rig.kubelet.api.resources.of("resourceclaims"))


def said(rig: EmbeddedRig, reason: str = "ClaimRefused") -> set[tuple[str, str]]:
    """Kinds of objects and texts of events."""
    return {
        (each["involvedObject"]["kind"], each["message"])
        for each in rig.http.events
        if each["reason"] == reason
    }


@pytest.mark.parametrize("why", ["adminAccess", "configuration", "two shares"])
async def test_a_bad_claim_is_refused_and_says_so(why: str) -> None:
    async with one_device() as (node, rig):
        if why == "adminAccess":
            pod = asking("bad", WHOLE_GPUS, adminAccess=True)
        else:
            pod = asking("bad", SHARES, 10, 10)
        if why == "two shares":
            both = tuple(replace(pod.claims[0], name=name) for name in ("a", "b"))
            pod = PodSpec("bad", (ContainerSpec("main", claims=("a", "b")),), claims=both)
        if why == "configuration":
            opaque = {
                "driver": DRIVER,
                "parameters": {"apiVersion": "gpu-node-agent.io/v1", "kind": "GpuConfig"},
            }
            spec = copy.deepcopy(pod.claims[0].template)
            assert spec
            spec["devices"]["config"] = [{"opaque": opaque}]
            pod = replace(pod, claims=(PodClaim("gpu", template=spec),))
        await rig.create_pod(pod)
        await seen(lambda: {kind for kind, _ in said(rig)} == {"ResourceClaim", "Pod"})
        assert await rig.phase(pod) is Phase.PENDING
        (gpu, *_) = (await status_of(node))["gpus"]
        assert (gpu["mode"]["active"], gpu["holders"], gpu["mps"]) == ("dra", [], None)
        await seen(lambda: any((each["status"].get("devices")) for each in claims(rig)))
        (condition,) = claims(rig)[0]["status"]["devices"][0]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "False", "Refused")
        await rig.delete_pod(pod)
        good = asking("good", SHARES, 10, 10)
        await run(rig, good)


async def test_a_sick_or_cordoned_gpu_keeps_its_holder_and_takes_no_claims() -> None:
    async with one_device() as (node, rig):
        share = asking("share", SHARES, 10, 10)
        await run(rig, share)
        first = rig.gpu_uuids()[0]
        pool = f"{DRIVER}/{rig.node_name}"
        rig.machine.lose(first)
        await seen(lambda: "unhealthy" in {key for key, _ in taints(rig, first, SHARES)})
        name = device_name(first, SHARES)
        await seen(lambda: (rig.kubelet.device_health(DRIVER, pool, name) or (0, ""))[0] == 2)
        verdict = rig.kubelet.device_health(DRIVER, pool, name)
        assert verdict
        assert verdict[1]
        assert await rig.phase(share) is Phase.RUNNING
        rig.machine.restore(first)
        rig.http.set_annotation("gpu-node-agent.io/cordon", f"{first}=fan")
        await seen(lambda: ("unavailable", "cordoned") in taints(rig, first, WHOLE_GPUS), 120)
        assert await rig.phase(share) is Phase.RUNNING
        assert (await status_of(node))["gpus"][0]["mps"]["state"] == "serving"


async def test_the_kubelets_own_refusal_is_made_good_by_an_annotation() -> None:
    async with one_device(resync=600.0) as (_, rig):
        rig.kubelet.api.resources.forbidden_reads = 1
        whole = asking("whole", WHOLE_GPUS)
        await rig.create_pod(whole)
        await rig.wait_phase(whole, Phase.RUNNING, 10)
        assert "gpu-node-agent.io/prepare-again" in rig.kubelet.pod(whole).annotations


async def test_a_claim_of_two_pods_and_a_kubelet_that_restarts() -> None:
    async with one_device() as (node, rig):
        template = asking("x", SHARES, 50, 20).claims[0].template
        metadata = {"name": "both", "namespace": "default"}
        await rig.create_resource("ResourceClaim", {"metadata": metadata, "spec": template})
        pods = [
            PodSpec(f"user-{n}", (ContainerSpec("main", claims=("gpu",)),), claims=(PodClaim("gpu", "both"),))
            for n in range(2)
        ]
        await run(rig, *pods)
        daemon = await node.pids()
        await rig.restart_kubelet()
        await offered(rig, 1)
        for pod in pods:
            assert await rig.phase(pod) is Phase.RUNNING
        await rig.delete_pod(pods[0])
        assert await node.pids() == daemon
        await rig.delete_pod(pods[1])
        with anyio.fail_after(scaled(10)):
            while await node.pids():
                await anyio.sleep(0.05)


async def test_daemon_is_kept_warm_and_a_reserve_takes_no_shares() -> None:
    async with one_device(**{"dra.keepDaemonSeconds": 600, "dra.reserveWhole": 0}) as (node, rig):
        share = asking("share", SHARES, 10, 10)
        await run(rig, share)
        daemon = await node.pids()
        await rig.delete_pod(share)
        await anyio.sleep(1)
        assert await node.pids() == daemon
        await run(rig, asking("again", SHARES, 10, 10))
        assert await node.pids() == daemon
