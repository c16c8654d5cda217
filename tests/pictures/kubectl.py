"""`kubectl gpu` and its page over a simulated node at work. The plugin is the file that the chart brings."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from agent.kubectl.cluster import cluster_view
from agent.simulator.demo.page import over
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.browser import browser, served
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pictures import png, terminal
from tests.plugin_file import FILE
from tests.scenarios.mode_node import mode_node
from tests.scenarios.modes import LAYOUTS
from tests.scenarios.rig import GPU

COMMANDS = (
    ("top", "--once"),
    ("explain", "classifier"),
    ("explain", "vgpu-1"),
    ("switch", "NODE", "vgpu", "--dry-run"),
)
WIDTH, HEIGHT = 1200, 620
SETTLE_SECONDS = 5.0
# In place of kubectl: the simulated API server asks for no login.
READER = """#!{python}
import sys, urllib.request
if sys.argv[1:3] == ["get", "--raw"]:
    print(urllib.request.urlopen("http://127.0.0.1:{port}" + sys.argv[3]).read().decode())
"""


async def made(folder: Path) -> None:
    """Write kubectl-gpu.svg and page.png."""
    async with (
        embedded_rig() as rig,
        mode_node(rig, layouts=LAYOUTS, vgpu__enforcement="off") as node,
    ):
        await node.want("mixed")
        await node.applied("mixed")
        for mode, count in (("pgpu", 3), ("vgpu", 3), ("mps", 2)):
            await node.offers(mode, count)
        for mode in ("pgpu", "vgpu", "mps"):
            await node.run(mode, *(f"{mode}-{number}" for number in range(2)))
        rig.machine.fall_off_bus(2)
        await node.offers("pgpu", 2)
        await rig.create_pod(PodSpec("classifier", (ContainerSpec("main", {GPU: 2}),)))
        await anyio.sleep(SETTLE_SECONDS)
        text = await anyio.to_thread.run_sync(_recorded, rig)
        get = over(f"http://127.0.0.1:{rig.http.port}")
        async with served(lambda: cluster_view(get, "default")) as page, browser() as tab:
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            await tab.call("Emulation.setDeviceMetricsOverride", **size)
            await tab.open(page.address)
            await tab.until("document.body?.dataset.drawn")
            size["height"] = await tab.value("document.body.scrollHeight + 16")  # no part of a row, no bar
            await tab.call("Emulation.setDeviceMetricsOverride", **size)
            await tab.call("Emulation.setScrollbarsHidden", hidden=True)
            shot = await tab.call("Page.captureScreenshot", format="png")
    (folder / "kubectl-gpu.svg").write_text(terminal.drawn("kubectl gpu", text), encoding="utf-8")
    (folder / "page.png").write_bytes(png.smaller(base64.b64decode(shot["data"])))


def _recorded(rig: EmbeddedRig) -> str:
    """The output of the commands, one after the other."""
    reader = rig._folder / "reader"
    reader.write_text(READER.format(python=sys.executable, port=rig.http.port))
    reader.chmod(0o755)
    text = ""
    for words in ((), *COMMANDS):
        named = [rig.kubelet.api.node_name if word == "NODE" else word for word in words]
        done = subprocess.run(
            [sys.executable, str(FILE), *named],
            env={**os.environ, "KUBECTL": str(reader)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        text += (f"\n$ kubectl gpu {' '.join(named)}\n" if words else "") + done.stdout
    return text
