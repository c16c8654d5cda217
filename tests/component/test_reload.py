"""A changed configuration is taken up while the agent runs; a bad one leaves the last good one in force."""

import signal
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import yaml

from tests.cluster.agent_process import nested
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.scenarios.mode_node import ModeNode
from tests.scenarios.rig import GPU
from tests.scenarios.vgpu import CORE

LINK = "..data"  # as the kubelet lays out a ConfigMap: the file is a link into a folder that a link names


class Mounted:
    """The configuration file of the agent, mounted as from a ConfigMap."""

    def __init__(self, rig: EmbeddedRig) -> None:
        """Blocks."""
        self._folder = rig.agent_log().parent
        self._versions = 0
        self._settings = rig._settings()
        self.swap({})
        (self._folder / "config.yaml").symlink_to(f"{LINK}/config.yaml")

    def swap(self, more: Mapping[str, object], text: str | None = None) -> None:
        """A new version takes the place of the old one in one step. Blocks."""
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        content = yaml.safe_dump(nested(self._settings | dict(more)))
        (version / "config.yaml").write_text(text or content)
        fresh = self._folder / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.rename(self._folder / LINK)


async def logged(node: ModeNode, event: str, count: int) -> Mapping[str, object]:
    """Wait until something was logged so often; the newest of it."""
    with anyio.fail_after(20):
        while len(lines := await node.logged(event)) < count:
            await anyio.sleep(0.05)
    return lines[-1]


async def test_a_configuration_is_taken_up_and_a_bad_one_is_not() -> None:
    async with embedded_rig() as rig:
        mounted = await anyio.to_thread.run_sync(Mounted, rig)
        node = ModeNode(rig, Path("/"), {}, Path("/"))
        await rig.start_agent()
        await rig.wait_allocatable(8)
        layouts = {"half": [{"gpus": ["0-3"], "mode": "pgpu"}, {"gpus": ["rest"], "mode": "vgpu"}]}
        await anyio.to_thread.run_sync(mounted.swap, {"layouts": layouts, "defaultMode": "half"})
        await rig.wait_allocatable(4)
        await rig.wait_allocatable(400, CORE)
        # One that cannot be: reported, and nothing changes.
        await anyio.to_thread.run_sync(mounted.swap, {"defaultMode": "nonsense"})
        faults = (await logged(node, "configuration_rejected", 1))["faults"]
        assert "defaultMode" in str(faults)
        status, text = await node.get("/readyz")
        assert status == 200
        assert "the newest configuration was rejected" in text
        assert await rig.allocatable(CORE) == 400
        await anyio.to_thread.run_sync(mounted.swap, {}, "neither: [YAML")
        await logged(node, "configuration_rejected", 2)
        # Keys that take a restart are named.
        await anyio.to_thread.run_sync(mounted.swap, {"http.port": 9, "layouts": layouts})
        changed = await logged(node, "configuration_changed", 2)
        assert changed["need_restart"] == ["http"]
        await rig.wait_allocatable(8)
        await rig.wait_allocatable(0, CORE)
        assert (await node.get("/readyz"))[1] == "ready\n"
        assert rig.agent_running()


async def test_sighup_loads_a_file_that_was_written_in_place() -> None:
    async with embedded_rig() as rig:
        node = ModeNode(rig, Path("/"), {}, Path("/"))
        await rig.start_agent()
        await rig.wait_allocatable(8)
        file = rig.agent_log().parent / "config.yaml"
        text = yaml.safe_dump(nested(rig._settings() | {"defaultMode": "none"}))
        await anyio.to_thread.run_sync(file.write_text, text)
        assert rig.agent.pid is not None
        rig.agent.send(signal.SIGHUP)
        assert (await logged(node, "signal_received", 1))["signal"] == "SIGHUP"
        await rig.wait_allocatable(0, GPU)
        assert rig.agent_running()
