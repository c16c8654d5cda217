"""Instances of a GPU: from a new layout to the kubelet's end of the sockets."""

import time
from collections.abc import Mapping
from contextlib import ExitStack

import anyio
import anyio.to_thread

from tests.bench.conditions import Conditions, Node
from tests.bench.figures.switch import DEADLINE_SECONDS, HEALTHY, SPACING_SECONDS, Listener, pod_resources
from tests.bench.registry import Figure, Taken, measurement, percentile

LAYOUTS, WARM_UP = 25, 3
SMALL, HALF = "nvidia.com/mig-1g.18gb", "nvidia.com/mig-3g.71gb"
OFFERS = {"some": {SMALL: 1, HALF: 1}, "more": {SMALL: 3, HALF: 1}}
"""Instances of each layout: the second is the first with two more, in slots that are free."""


class InstanceListener(Listener):
    """Waits for a layout in place of a mode."""

    def _shows(self, mode: str) -> bool:
        return all(self._lists.get(name, b"").count(HEALTHY) == n for name, n in OFFERS[mode].items())


@measurement(
    Figure(
        "mig_layout_p99_ms",
        "ms",
        30,
        "a layout with two more MIG instances asked for until the lists have them, their slots free; 8 GPUs",
    ),
)
async def mig_layout(conditions: Conditions) -> Mapping[str, Taken]:
    """The double's NVML takes next to no time: what a driver takes to make an instance is not in it."""
    layouts = {
        name: [
            {
                "gpus": [0],
                "mode": "mig",
                "mig": [each.rpartition("-")[2] for each, count in offers.items() for _ in range(count)],
            },
            {"gpus": ["rest"], "mode": "pgpu"},
        ]
        for name, offers in OFFERS.items()
    }
    async with conditions.node({"layouts": layouts, "mig.manage": True}) as node:
        node.machine.set_mig(0, enabled=True)
        node.agent.settings["modeFile"] = str(node.folder / "mode")
        await anyio.Path(node.folder / "mode").write_text("more")
        await node.kubelet.stop()  # see `switch`
        with pod_resources(node.kubelet.pod_resources_socket), ExitStack() as stack:
            await node.agent.start()
            taken = await _layouts(node, stack)
    return {"mig_layout_p99_ms": Taken(percentile(taken, 0.99), len(taken))}


async def _layouts(node: Node, stack: ExitStack) -> list[float]:
    """Milliseconds until each."""
    listener = InstanceListener()
    for resource in (SMALL, HALF):
        with anyio.fail_after(DEADLINE_SECONDS):
            while not await anyio.Path(node.socket(resource)).is_socket():
                await anyio.sleep(0.02)
        listener.follow(node.socket(resource), resource, stack)
    stack.callback(listener.closing)

    def ask(layout: str) -> float:
        began = time.perf_counter()
        (node.folder / "mode").write_text(layout)
        return (listener.wait(layout) - began) * 1000

    taken: list[float] = []
    await anyio.to_thread.run_sync(listener.wait, "more")
    for _ in range(WARM_UP + LAYOUTS):
        for layout in OFFERS:
            took = await anyio.to_thread.run_sync(ask, layout)
            if layout == "more":
                taken.append(took)
            await anyio.sleep(SPACING_SECONDS)
    return taken[WARM_UP:]
