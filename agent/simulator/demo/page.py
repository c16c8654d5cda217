"""The page of `kubectl gpu` over the simulated node, where the demo is asked for it."""

import json
import urllib.error
import urllib.request
from typing import Any

import anyio
import anyio.to_thread

from agent.app import run as app
from agent.kubectl.cluster import cluster_view
from agent.kubectl.kube import Get, KubectlFailed
from agent.kubectl.page import Page
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import Stage, gpu_pod
from agent.simulator.nvml import SimulatedNvml

ANSWER_SECONDS = 10.0


async def show_page(stage: Stage, screen: Screen) -> None:
    """Name the page's address, and serve it until the demo is interrupted."""
    await stage.clear()
    async with stage.api() as (http, access):
        configuration = await anyio.to_thread.run_sync(stage.settings, {"defaultMode": "pgpu", **access})
        async with app.running(configuration, SimulatedNvml(stage.machine)):
            count = len(stage.machine.uuids)
            await stage.offers(count)
            await stage.run(gpu_pod("train", max(1, count // 4)), gpu_pod("notebook", 1))
            stage.create(gpu_pod("waits", count + 1))
            get = over(f"http://127.0.0.1:{http.port}")
            page = await anyio.to_thread.run_sync(Page(lambda: cluster_view(get, "default")).__enter__)
            try:
                screen.gap()
                screen.title("The node as `kubectl gpu page` shows it; Control-C ends the demo:")
                screen.say(page.address)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(page.__exit__, None, None, None)


def over(url: str) -> Get:
    """A way to an API server that asks for no login; blocks."""

    def get(path: str) -> Any:  # noqa: ANN401  a value of JSON
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=ANSWER_SECONDS) as answer:  # noqa: S310  a fixed scheme
                return json.load(answer)
        except (urllib.error.URLError, ValueError) as error:
            raise KubectlFailed(f"the simulated API server does not answer: {error}") from error

    return get
