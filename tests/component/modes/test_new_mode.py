"""A new mode is a wing, a row in the table of modes, and its name in the tuple of wings."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import agent
from agent.model.node_inventory import INVENTORY
from agent.modes.desired import LABEL
from agent.node.conditions import CONDITION, MODE_LABEL, STATE_ANNOTATION
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.scenarios import agent_face
from tests.scenarios.rig import GPU

MADE_UP = Path(__file__).with_name("made_up_mode.py")
HALF, GPUS = "example.com/half-gpu", 8
TUPLE, AN_IMPORT = "WINGS: tuple[type[Wing], ...] = (", "from agent.whole.wing import WholeWing\n"
LAST_ROW = "    @property\n    def resources(self)"
FACT = "NOTHING: Final"
TWO = "def _two(*_: object) -> int:\n    return 2\n\n\n"
ROW = f'    HALF = ("half", ModeRow(("{HALF}",), (Unit("h", UnitKind.REPLICA),), client_ceiling=_two))\n\n'


def copy_with_the_mode(folder: Path) -> Path:
    """The whole agent, with one new file, one new row, and the name of the new wing."""
    here = Path(agent.__file__).parent
    shutil.copytree(here, folder / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "agent" / "half").mkdir()
    shutil.copy(MADE_UP, folder / "agent" / "half" / "wing.py")
    table = folder / "agent" / "model" / "modes.py"
    text = table.read_text()
    assert text.count(LAST_ROW) == text.count(FACT) == 1
    table.write_text(text.replace(LAST_ROW, ROW + LAST_ROW).replace(FACT, TWO + FACT))
    wings = folder / "agent" / "app" / "wings.py"
    text = wings.read_text()
    assert text.count(TUPLE) == text.count(AN_IMPORT) == 1
    text = text.replace(TUPLE, f"{TUPLE}Half, ")
    wings.write_text(text.replace(AN_IMPORT, f"{AN_IMPORT}from agent.half.wing import Half\n"))
    return folder


def status(checkout: Path, run: str) -> dict[str, Any]:
    """The output of `gpu-node-agent status --json`."""
    command = [sys.executable, "-m", "agent", "status", "--json", f"--set=host.run={run}"]
    answer = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True, timeout=30)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


async def applied(rig: EmbeddedRig, word: str) -> None:
    """Label the node, wait until the mode is in force by label, condition and annotation."""
    await rig.set_labels({LABEL: word})
    with anyio.fail_after(30):
        while True:
            node = await rig.node()
            state = json.loads(node.annotations.get(STATE_ANNOTATION, "{}"))
            if (
                node.labels.get(MODE_LABEL) == word == state.get("desired")
                and state["state"] == "applied"
                and node.conditions.get(CONDITION, ("",))[0] == "True"
            ):
                return
            await anyio.sleep(0.05)


async def test_new_mode_is_one_file(tmp_path: Path) -> None:
    async with embedded_rig() as rig:
        rig.agent.checkout = await anyio.to_thread.run_sync(copy_with_the_mode, tmp_path)
        settings = {"defaultMode": "none", **await rig.api_access()}
        await rig.start_agent(settings)
        # Switched to from a mode that the product has, and advertised.
        await applied(rig, "pgpu")
        await rig.wait_allocatable(GPUS, GPU)
        await applied(rig, "half")
        await rig.wait_allocatable(2 * GPUS, HALF)
        assert not await rig.allocatable(GPU)
        # Allocated.
        pod = PodSpec("half", (ContainerSpec("main", {HALF: 1}),))
        await rig.create_pod(pod)
        await rig.wait_phase(pod, Phase.RUNNING)
        (held,) = await rig.held_ids(pod, "main", HALF)
        uuid, _, unit = held.partition("::")
        assert unit in ("h0", "h1")
        assert rig.device_node(uuid) in await rig.container_device_nodes(pod, "main")
        # Shown in status and metrics.
        report = await anyio.to_thread.run_sync(status, rig.agent.checkout, str(rig._settings()["host.run"]))
        (gpu,) = [each for each in report["gpus"] if each["uuid"] == uuid]
        assert (gpu["mode"]["active"], gpu["mode"]["wanted"]) == ("half", "half")
        assert [each["pod"] for each in gpu["holders"]] == ["default/half"]
        modes = r'gpu_agent_gpu_mode_info\{[^}]*mode="half"[^}]*\}'
        assert await agent_face.metric(rig, modes) == GPUS
        assert await agent_face.metric(rig, rf'gpu_agent_resource_registered\{{resource="{HALF}"\}}') == 1
        # Shown to schedulers, with the facts of its row.
        shown = json.loads((await rig.node()).annotations[INVENTORY])["gpus"]
        assert [(each["m"], each["c"]) for each in shown] == [("half", 2)] * GPUS
        # A GPU in use drains, and the mode is known over a restart by its device IDs.
        await rig.set_labels({LABEL: "pgpu"})
        await rig.wait_allocatable(GPUS - 1, GPU)
        await rig.kill_agent()
        await rig.start_agent(settings)
        await rig.wait_allocatable(GPUS - 1, GPU)
        await rig.delete_pod(pod)
        await rig.wait_allocatable(GPUS, GPU)
        await applied(rig, "pgpu")
