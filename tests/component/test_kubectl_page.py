"""The page of `kubectl gpu` over a real agent on a simulated node, in a real browser."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import anyio
import anyio.to_thread

from agent.kubectl.cluster import cluster_view
from agent.kubectl.kube import KubectlFailed
from tests.browser import Tab, browser, served
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.pace import scaled
from tests.scenarios.skeleton import gpu_pod, running

QUIET = {"health.kernelLog": None}
TILES = "[...document.querySelectorAll('.gpu')].map((one) => one.getAttribute('aria-label'))"


def view_of(rig: EmbeddedRig) -> Any:
    """The view of an administrator of the simulated cluster."""

    def get(path: str) -> Any:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{rig.http.port}{path}", timeout=scaled(10)
            ) as answer:
                return json.load(answer)
        except urllib.error.URLError as error:
            raise KubectlFailed(str(error)) from error

    return cluster_view(get, "default")


async def status(rig: EmbeddedRig) -> Any:
    command = [
        sys.executable,
        "-m",
        "agent",
        "status",
        "-o",
        "json",
        f"--config={rig._folder / 'config.yaml'}",
    ]
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    )
    return json.loads(done.stdout)


def by_status(gpu: dict[str, Any]) -> str:
    """The words of a tile, as `status` has the GPU."""
    healthy = gpu["health"]["state"] == "healthy"
    words = [f"GPU {gpu['index']}", f"mode {gpu['mode']['active']}"]
    words.append("healthy" if healthy else f"unhealthy: {gpu['health']['cause']}"[:51])
    if gpu["cordon"]:
        words.append(f"cordoned: {gpu['cordon']['reason']}")
    pods = [each["pod"] for each in gpu["holders"]]
    words.append(f"{len(pods)} of 1 used")
    words.append(f"held by {', '.join(pods)}" if pods else "free")
    return ", ".join(words)


async def same(rig: EmbeddedRig, tab: Tab) -> None:
    """Wait until the page shows what `status` shows."""
    wanted: list[str] = []
    tiles: list[str] = []
    with anyio.move_on_after(scaled(20)):
        while not wanted or wanted != tiles:
            wanted = [by_status(gpu) for gpu in (await status(rig))["gpus"]]
            tiles = [each.replace(" -> ", "") for each in await tab.value(TILES)]
    assert tiles == wanted


async def test_page_equals_status() -> None:
    async with embedded_rig() as rig:
        await rig.start_agent({**QUIET, **await rig.api_access()})
        await rig.wait_allocatable(8)
        await running(rig, [gpu_pod("holder", 2), gpu_pod("other", 1)])
        rig.machine.xid(7, 119)
        await rig.wait_allocatable(7)
        async with served(lambda: view_of(rig)) as page, browser() as tab:
            await tab.open(page.address)
            await tab.until("document.querySelectorAll('.gpu').length === 8")
            await same(rig, tab)
            shown = await tab.value("document.body.innerText")
            assert "GPUUnhealthy" in shown


async def test_page_shows_a_fault() -> None:
    """Within 2 s of the browser and of a machine that nobody else uses; the limit here is for a busy one."""
    async with embedded_rig() as rig:
        await rig.start_agent({**QUIET, **await rig.api_access()})
        await rig.wait_allocatable(8)
        async with served(lambda: view_of(rig)) as page, browser() as tab:
            await tab.open(page.address)
            await tab.until("document.querySelectorAll('.gpu').length === 8")
            await anyio.sleep(2.5)  # what the start of the agent wrote is behind it
            rig.machine.xid(3, 79)
            took = await tab.until("document.querySelectorAll('.gpu.bad').length === 1")
            assert "Xid 79" in (await tab.value(TILES))[3]
            assert took < scaled(2), took
