"""Parts that nobody uses cost a running agent nothing, and are there when they are wanted."""

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
from agent.settings import ClusterSettings, HostSettings, HttpSettings, Kubelet, Settings, Vgpu
from agent.simulator.kubelet import EmbeddedKubelet, Timings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.vgpu.library import ELF

LIMITS = {"limits", "limit sweep", "limits published"}
folder, first, then = Path(sys.argv[1]), *sys.argv[2:]
mode = folder / "mode"
settings = Settings(
    mode_file=str(mode),
    http=HttpSettings(address="127.0.0.1", port=0),
    kubelet=Kubelet(root=str(folder / "k")),
    cluster=ClusterSettings(access="off"),
    vgpu=Vgpu(library=str(folder / "library.so")),
    host=HostSettings(state=str(folder / "state"), run=str(folder / "run"), cdi=str(folder / "cdi")),
)

def found(agent):
    # The API client, tasks of limits, and what is on the host.
    client = sorted(each for each in sys.modules if each.startswith("kubernetes_asyncio"))
    tasks = sorted(each for each in agent.core.supervisor.states if "limit" in each)
    files = [name for name in ("run/limits", "state/lib") if (folder / name).exists()]
    return [client, tasks, files]

async def offered(agent, wanted):
    def all_of_them(state):
        return bool(state.gpus) and all(each.active.mode.value == wanted for each in state.gpus)
    await agent.switcher.state.wait_for(all_of_them)

async def main():
    mode.write_text(first)
    (folder / "library.so").write_bytes(ELF)
    seen = []
    kubelet = EmbeddedKubelet(folder / "k", status_tick=0.05, timings=Timings(registry_poll=0.05))
    with anyio.fail_after(100):
        async with (
            kubelet.running(),
            running(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200"))) as agent,
        ):
            await offered(agent, first)
            seen.append(found(agent))
            mode.write_text(then)
            await offered(agent, then)
            # Limits have begun some turns of the loop before their last task has.
            while then == "vgpu" and not LIMITS <= set(agent.core.supervisor.states):
                await anyio.sleep(0.01)
            seen.append(found(agent))
    print(json.dumps(seen))

anyio.run(main)
"""


def _found(first: str, then: str) -> list[list[list[str]]]:
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
    found: list[list[list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(150)
async def test_limits_begin_when_the_first_gpu_is_offered_as_vgpu() -> None:
    before, after = await anyio.to_thread.run_sync(_found, "pgpu", "vgpu")
    assert before == [[], ["vgpu limits"], []]
    assert {"limits", "limit sweep", "limits published", "vgpu limits"} <= set(after[1])
    assert after[2] == ["run/limits", "state/lib"]
