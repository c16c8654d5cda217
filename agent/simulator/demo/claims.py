"""The act of claims (DRA): the first pod on a GPU chooses its mode, the last one frees it."""

from typing import Any, Final

import anyio
import anyio.to_thread

from agent.app import run as app
from agent.model.cuda import THREAD_PERCENTAGE
from agent.simulator.demo.mps_pods import tear_down
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import Stage
from agent.simulator.kubelet import ContainerSpec, PodClaim, PodSpec
from agent.simulator.kubelet.resource_objects import CLASSES, SLICES
from agent.simulator.nvml import SimulatedNvml

DRIVER: Final = "gpu-node-agent.io"
SHARES: Final = (("chat", 50, 6), ("embed", 30, 4))  # pod, cores, GiB


async def claims(stage: Stage, screen: Screen, number: int) -> None:
    """Clear the node, start the agent in mode dra, and have shares and whole GPUs follow each other."""
    await stage.clear()
    for kind in ("whole", "mps"):
        stage.kubelet.api.resources.create(CLASSES, _device_class(kind))
    async with stage.api() as (_, access):
        more = {"defaultMode": "dra", "dra.enabled": "true", **access}
        more |= {**await stage.with_mps(), **await stage.with_cdi()}
        configuration = await anyio.to_thread.run_sync(stage.settings, more)
        screen.act(number, "The agent is back, in mode dra: the first pod on a GPU chooses")
        async with app.running(configuration, SimulatedNvml(stage.machine)) as agent:
            try:
                await _play(stage, screen)
                await stage.clear()
            finally:
                with anyio.CancelScope(shield=True):
                    await tear_down(agent)


async def _play(stage: Stage, screen: Screen) -> None:
    count = len(stage.machine.uuids)
    slices = stage.kubelet.api.resources
    await stage.wait(
        lambda: sum(len(each["spec"].get("devices", ())) for each in slices.of(SLICES)) == 2 * count,
        lambda: f"the slices are {list(slices.of(SLICES))}",
    )
    screen.seen(
        f"{count} GPUs stand in its ResourceSlices, each as a whole and as MPS shares; no label changes."
    )
    shares = [_pod(name, _request("mps", cores, gib)) for name, cores, gib in SHARES]
    others = _pod("training", _request("whole", count=count - 1)) if count > 1 else None
    await stage.run(*shares)
    seen = [stage.kubelet.container(pod, "main").env.get(THREAD_PERCENTAGE) for pod in shares]
    stage.check(seen == [str(cores) for _, cores, _ in SHARES], f"the shares are {seen}")
    names = " and ".join(f"{name} with {cores} %" for name, cores, _ in SHARES)
    screen.seen(f"{names} came first: their GPU has become one of MPS, with one daemon.")
    if others:
        await stage.run(others)
        screen.seen(f"training has the {count - 1} other GPUs, whole.")
    late = _pod("late", _request("whole"))
    stage.create(late)
    state = stage.kubelet.pod(late)
    await stage.wait(
        lambda: state.reason == "Unschedulable", lambda: f"pod late is {state.phase}, not waiting"
    )
    screen.seen("late asks for a whole GPU and waits: the shares keep theirs.")
    for pod in shares:
        await stage.delete(pod)
    took = await stage.runs(late)
    screen.seen(f"The last share ends; {took * 1000:.0f} ms later its GPU is late's, whole.")


def _device_class(kind: str) -> dict[str, Any]:
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].mode == '{kind}'"
    return {"metadata": {"name": f"gpu-{kind}"}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


def _request(kind: str, cores: int = 0, gib: int = 0, count: int = 1) -> dict[str, Any]:
    exactly: dict[str, Any] = {"deviceClassName": f"gpu-{kind}", "count": count}
    if cores:
        exactly["capacity"] = {"requests": {"cores": str(cores), "memory": f"{gib}Gi"}}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


def _pod(name: str, spec: dict[str, Any]) -> PodSpec:
    containers = (ContainerSpec("main", claims=("gpu",)),)
    return PodSpec(name, containers, claims=(PodClaim("gpu", template=spec),))
