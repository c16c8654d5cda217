"""Another vendor's plugin on the same node: a third resource, for which pods are rejected at admission.

The kubelet asks for the resources of a container in any order, so its refusal comes before, between and after
the two halves of a share.
"""

import random

import anyio

from agent._proto.v1beta1 import ContainerAllocateResponse, Device, DevicePluginOptions
from agent.simulator.kubelet.device_tables import HEALTHY, CallFailed, Endpoint
from agent.simulator.kubelet.embedded import EmbeddedKubelet

OTHERS = "example.com/rail"
COUNT = 6


class Neighbour:
    """The plugin; see `device_tables.PluginCalls`."""

    def __init__(self, seed: int) -> None:
        self.refuses = 0.5  # how often
        self.seconds = 0.0  # that it takes to answer
        self._rng = random.Random(f"neighbour of {seed}")

    def calm(self) -> None:
        """It refuses nobody."""
        self.refuses = self.seconds = 0.0

    def register(self, kubelet: EmbeddedKubelet) -> None:
        """Be known to this life of the kubelet, as after ListAndWatch's first list."""
        if (life := kubelet._life) is not None:
            tables = life.devices.tables
            tables.endpoints[OTHERS] = Endpoint(OTHERS, self, DevicePluginOptions())
            tables.replace_list(OTHERS, [Device(id=f"rail-{n}", health=HEALTHY) for n in range(COUNT)])

    async def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """No preference."""
        del must_include
        return available[:size]

    async def allocate(self, ids: list[str]) -> list[ContainerAllocateResponse]:
        """The answer for a container. Raises CallFailed."""
        del ids
        if self.seconds:
            await anyio.sleep(self.seconds)
        if self._rng.random() < self.refuses:
            raise CallFailed(f"rpc error: code = Unknown desc = {OTHERS}: no such port")
        return [ContainerAllocateResponse()]

    async def pre_start(self, ids: list[str]) -> None:
        """Nothing."""
