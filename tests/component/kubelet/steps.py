"""Steps of most tests of the embedded kubelet: make pods, wait for them, read their devices."""

from typing import Any

from agent.simulator.kubelet import ContainerSpec, EmbeddedKubelet, Phase, PodSpec
from tests.component.kubelet.peer import GPU
from tests.component.kubelet.waiting import eventually

OTHER = "example.com/other"
EIGHT = dict.fromkeys("abcdefgh", True)


def pod(name: str, amount: int = 1, resource: str = GPU, **more: Any) -> PodSpec:
    return PodSpec(name, (ContainerSpec("main", {resource: amount}),), **more)


def held(kubelet: EmbeddedKubelet, spec: PodSpec, container: str = "main") -> set[str]:
    return set(kubelet.container(spec, container).env["HELD"].split(","))


async def run(kubelet: EmbeddedKubelet, spec: PodSpec, phase: Phase = Phase.RUNNING) -> None:
    kubelet.create_pod(spec)
    await eventually(lambda: kubelet.pod(spec).phase is phase)


async def ready(kubelet: EmbeddedKubelet, count: int = 8, resource: str = GPU) -> None:
    await eventually(lambda: kubelet.allocatable.get(resource) == count)
