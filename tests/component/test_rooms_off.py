"""Rooms that nobody uses are not imported by a running agent, and are there when they are wanted."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio.to_thread
import pytest

ROOT = Path(__file__).parents[2]
# In an interpreter of its own, since a test run has imported all rooms.
SCRIPT = """
import json, sys
from pathlib import Path

import anyio

from agent.app.run import running
from agent.model.modes import Mode
from agent.settings import ClusterSettings, HostSettings, HttpSettings, Kubelet, Settings
from agent.simulator.kubelet import EmbeddedKubelet, Timings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml

folder, first, then = Path(sys.argv[1]), *sys.argv[2:]
mode = folder / "mode"
settings = Settings(
    mode_file=str(mode),
    http=HttpSettings(address="127.0.0.1", port=0),
    kubelet=Kubelet(root=str(folder / "k")),
    cluster=ClusterSettings(access="off"),
    host=HostSettings(state=str(folder / "state"), run=str(folder / "run"), cdi=str(folder / "cdi")),
)

def rooms():
    return sorted(each for each in sys.modules if each.startswith(("agent.isolation", "agent.cluster.")))

async def offered(agent, wanted):
    def all_of_them(state):
        return bool(state.gpus) and all(each.active.mode.value == wanted for each in state.gpus)
    await agent.switcher.state.wait_for(all_of_them)

async def main():
    mode.write_text(first)
    found = []
    kubelet = EmbeddedKubelet(folder / "k", status_tick=0.05, timings=Timings(registry_poll=0.05))
    with anyio.fail_after(100):
        async with (
            kubelet.running(),
            running(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200"))) as agent,
        ):
            await offered(agent, first)
            found.append(rooms())
            mode.write_text(then)
            await offered(agent, then)
            while then == "vgpu" and agent.modes[Mode.VGPU].limits.parts is None:
                await anyio.sleep(0.01)
            found.append(rooms())
    print(json.dumps(found))

anyio.run(main)
"""


def _rooms(first: str, then: str) -> list[list[str]]:
    with tempfile.TemporaryDirectory(prefix="gna-") as folder:  # short, for unix sockets
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder, first, then],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(150)
async def test_limits_are_imported_when_the_first_gpu_is_offered_as_vgpu() -> None:
    before, after = await anyio.to_thread.run_sync(_rooms, "pgpu", "vgpu")
    assert [each for each in before if each != "agent.cluster.own_node"] == []
    assert {"agent.isolation.room", "agent.isolation.resize", "agent.isolation.watch"} <= set(after)
