"""Terminals: the demo, and `status`, `top`, `explain` of a node at work. All commands are the real ones."""

import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import yaml

from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry
from clib import build_library
from tests.component.embedded_rig import embedded_rig
from tests.component.extender.api import ClusterApi, gpus
from tests.pictures import terminal
from tests.scenarios.mode_node import mode_node
from tests.scenarios.modes import LAYOUTS
from tests.scenarios.monitoring import MODES, Work

PROFILE = "dgx-h200"
DEMO_SECONDS, COMMAND_SECONDS = 90.0, 30.0
ACTS = (7, 9)  # of the demo: pairs that share GPUs, and the switch; all of it would be five screens


def all_of_them() -> Mapping[str, str]:
    """SVG by name."""
    return {
        "demo": terminal.drawn(
            "make demo", acts_of(terminal.shown(["simulate", "--profile", PROFILE], DEMO_SECONDS))
        ),
        **anyio.run(_of_a_node_at_work),
        "explain": anyio.run(_explained),
    }


def acts_of(demo: str) -> str:
    """The head of the demo's output and `ACTS`. Raises ValueError where one is missing."""
    head, *rest = re.split(r"^(?=\S*\d+  )", demo, flags=re.MULTILINE)
    acts = {int(found[1]): act for act in rest if (found := re.match(r"(?:\x1b\[[\d;]*m)?(\d+)  ", act))}
    if missing := set(ACTS) - acts.keys():
        raise ValueError(f"the demo has no act {missing}")
    return "   ...\n\n".join((head, *(acts[each] for each in ACTS))) + "   ..."


async def _shown(*arguments: str) -> str:
    return await anyio.to_thread.run_sync(partial(terminal.shown, arguments, COMMAND_SECONDS))


async def _of_a_node_at_work() -> dict[str, str]:
    library = await anyio.to_thread.run_sync(build_library.cached)  # of an image
    async with (
        embedded_rig() as rig,
        mode_node(rig, layouts=LAYOUTS, vgpu__library=str(library)) as node,
        anyio.create_task_group() as group,
    ):
        await node.want("mixed")
        await node.applied("mixed")
        for mode, count in (("pgpu", 3), ("vgpu", 3), ("mps", 2)):
            await node.offers(mode, count)
        work = Work(node)
        for number, mode in enumerate(MODES):
            (pod,) = await node.run(mode, f"{('train', 'notebook', 'chat')[number]}")
            await work.start(pod, mode, 3000 + 20000 * (mode == "pgpu"), (92, 17, 12)[number])
        for slot in range(8):
            rig.machine.load(slot, utilization=0, power_w=74, temperature_c=31)
        rig.machine.load(0, utilization=92, power_w=610, temperature_c=64)
        rig.machine.load(3, utilization=17, power_w=160, temperature_c=42)
        rig.machine.load(6, utilization=12, power_w=140, temperature_c=40)
        rig.machine.fall_off_bus(2)
        group.start_soon(work.run)
        await anyio.sleep(8)  # a window of figures, and the kubelet's records
        where = f"--set=host.run={node.folder}"
        found = {
            "status": terminal.drawn("gpu-node-agent status", await _shown("status", where)),
            "top": terminal.drawn("gpu-node-agent top", await _shown("top", "--once", where)),
        }
        group.cancel_scope.cancel()
    return found


async def _explained() -> str:
    """A cluster of three nodes, as an API server in memory has it."""
    api = ClusterApi()
    api.node("gpu-1", *gpus(2))
    api.node("gpu-2", *gpus(1), GpuEntry("GPU-9", 1, Mode.VGPU, 81920, trouble="Xid 79"))
    api.node("gpu-3", *gpus(2, Mode.MPS))
    for name, cores, node, gpu in (
        ("web-1", 60, "gpu-1", 0),
        ("web-2", 70, "gpu-1", 1),
        ("search", 50, "gpu-2", 0),
    ):
        api.pod(name, cores, 100, node, annotations={"tencent.com/predicate-gpu-idx-0": str(gpu)})
    api.pod("classifier", 60, 64)
    async with api.serving() as url:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kubeconfig"
            await anyio.to_thread.run_sync(file.write_text, _kubeconfig(url))
            output = await _shown("explain", "ns/classifier", f"--kubeconfig={file}")
    return terminal.drawn("gpu-node-agent explain ns/classifier", output)


def _kubeconfig(url: str) -> str:
    named = {"name": "here"}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{**named, "cluster": {"server": url}}],
            "users": [{**named, "user": {"token": "none"}}],
            "contexts": [{**named, "context": {"cluster": "here", "user": "here"}}],
            "current-context": "here",
        }
    )
