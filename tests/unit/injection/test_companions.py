"""GDS, GDRCopy, MOFED and IMEX channels: what containers get beside their GPUs, and what a node must have."""

import json
import os
from pathlib import Path

import anyio.to_thread
import pytest

from agent.injection import companions
from agent.injection.inject import Injector
from agent.injection.toolkit import Places, Toolkit, parse
from agent.kubelet.wire import DeviceNode
from agent.settings import DriverFiles, Injection, Settings, Simulator
from tests.unit.injection.test_inject import _gpu, _with_own
from tests.unit.injection.test_specification import text
from tests.unit.injection.test_toolkit import Scene, scene

__all__ = ["scene"]

ALL = Injection(gds=True, gdrcopy=True, mofed=True, imex_channels=(0, 3))
NODES = (
    "nvidia-fs0",
    "nvidia-fs1",
    "gdrdrv",
    "infiniband/rdma_cm",
    "infiniband/uverbs0",
    "nvidia-caps-imex-channels/channel0",
    "nvidia-caps-imex-channels/channel3",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A driver root with all of them, and what a driver always has."""
    for name in ("nvidiactl", *NODES):
        file = tmp_path / "root" / "dev" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "root"


def settings(root: Path, **changes: object) -> Settings:
    injection = Injection(
        **{name: getattr(ALL, name) for name in ("gds", "gdrcopy", "mofed", "imex_channels")},
        driver_root=str(root),
        **changes,  # type: ignore[arg-type]
    )
    return Settings(injection=injection, driver=DriverFiles(dev_root="/"))


def test_nothing_is_looked_for_that_is_not_switched_on() -> None:
    assert companions.wanted(Injection()) == ()
    assert Injector(Settings()).companions == ()
    assert Injector(Settings(injection=ALL, simulator=Simulator(profile="dgx-h200"))).companions == ()


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("nvidia-fs*", "injection.gds is on, and this node has no /dev/nvidia-fs*"),
        ("gdrdrv", "injection.gdrcopy is on, and this node has no /dev/gdrdrv"),
        ("infiniband/uverbs0", "injection.mofed is on, and this node has no /dev/infiniband/uverbs*"),
        ("nvidia-caps-imex-channels/channel3", "no /dev/nvidia-caps-imex-channels/channel3"),
    ],
)
async def test_a_node_that_lacks_one_is_told_with_the_remedy(root: Path, gone: str, words: str) -> None:
    injector = Injector(settings(root, strategy="envvar"))
    await injector.update(None)
    assert injector.lacks.value == ""
    for path in (root / "dev").glob(gone):
        path.unlink()
    await injector.update(None)
    assert words in injector.lacks.value
    assert "leave it off for this node's pool" in injector.lacks.value


async def test_devices_of_the_toolkit_bring_none_of_them(root: Path) -> None:
    injector = Injector(settings(root, strategy="cdi"))
    await injector.update(None)
    assert "the agent's own CDI specification, which is not there" in injector.lacks.value
    own = await anyio.to_thread.run_sync(_with_own, settings(root, strategy="cdi"), "GPU-0")
    await own.update(None)
    assert own.lacks.value == ""


def test_nvidia_s_runtime_gets_a_variable_for_each_and_plain_ones_the_nodes(root: Path) -> None:
    injector = Injector(settings(root, strategy="envvar", device_nodes=True))
    injector.look(None)
    found = injector.allocation([_gpu(0)])
    assert found.environment == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_MOFED": "enabled",
        "NVIDIA_IMEX_CHANNELS": "0,3",
    }
    assert {DeviceNode(f"/dev/{name}", f"/dev/{name}") for name in NODES} < set(found.device_nodes)


async def test_the_generator_is_asked_for_each_that_is_there(root: Path, scene: Scene) -> None:
    """Its words become edits of every container, the wanted channels alone."""
    for mode, names in (("gds", ["all"]), ("imex", ["0", "1", "3"])):
        (scene.folder / f"{mode}.json").write_bytes(text(*names))
    for path in ("gdrdrv", "infiniband/uverbs0", "infiniband/rdma_cm"):
        (root / "dev" / path).unlink()
    scene.program(
        f'case "$*" in *mode=gds*) cat {scene.folder}/gds.json;; *mode=imex*) cat {scene.folder}/imex.json;; '
        f"*) cat {scene.folder}/spec.json;; esac"
    )
    made = await Toolkit(Places(scene.bin, root, root, scene.state, companions.wanted(ALL))).generate()
    modes = [word for call in scene.calls() for word in call if word.startswith("--mode=")]
    assert modes == ["--mode=nvml", "--mode=gds", "--mode=imex"]
    assert made.names == {"GPU-a"}
    assert made.content["containerEdits"]["env"] == ["IS=all", "IS=0", "IS=3"]


async def test_a_node_that_comes_back_with_another_number_is_seen(root: Path, scene: Scene) -> None:
    toolkit = Toolkit(Places(scene.bin, root, root, scene.state, companions.wanted(Injection(gdrcopy=True))))
    assert await toolkit.beside() == ("dev/gdrdrv 0",)
    (root / "dev" / "gdrdrv").unlink()
    assert await toolkit.beside() == ()
    (root / "dev" / "gdrdrv").symlink_to("/dev/null")
    (found,) = await toolkit.beside()
    assert found == f"dev/gdrdrv {os.makedev(1, 3)}"


def test_edits_that_are_there_already_are_not_added_again() -> None:
    ours = parse(text("GPU-a", containerEdits={"env": ["IS=all"], "mounts": [{"hostPath": "/x"}]}))
    both = ours.beside(parse(text("all", containerEdits={"hooks": [1]})), ("all",))
    assert both.content["containerEdits"] == {"env": ["IS=all"], "mounts": [{"hostPath": "/x"}], "hooks": [1]}
    assert json.loads(ours.encoded())["containerEdits"] == {
        "env": ["IS=all"],
        "mounts": [{"hostPath": "/x"}],
    }
