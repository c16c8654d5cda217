"""The wings of the agent, each complete by the interface."""

import ast
import inspect
from pathlib import Path

import agent
from agent.app.wings import WINGS
from agent.cluster.node import NodeInfo
from agent.model.modes import OFFERED_MODES, Mode
from agent.modes.wing import Wing
from agent.settings import ClusterSettings, HostSettings, Kubelet, Settings
from tests.wing_node import wing_node

ROOMS = {each.__module__.split(".")[1] for each in WINGS}


def _imports(path: Path) -> set[str]:
    """The rooms that a file imports, at any depth of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name.split(".")[1] for name in found if name.startswith("agent.")}


def test_the_agent_is_its_wings() -> None:
    assert {each.mode for each in WINGS} == set(OFFERED_MODES)
    assert len(WINGS) == len(OFFERED_MODES) == len(ROOMS)
    known = {name for name, _ in inspect.getmembers(Wing) if not name.startswith("_")}
    for wing in WINGS:
        assert issubclass(wing, Wing)
        assert not inspect.isabstract(wing)
        # A wing adds nothing that others could ask it for beside the interface, but parts of its own.
        added = {name for name, each in vars(wing).items() if callable(each) and not name.startswith("_")}
        assert added <= known, wing
        for name in added:
            here, there = (list(inspect.signature(getattr(each, name)).parameters) for each in (wing, Wing))
            assert here == there, (wing, name)
        prepares = {"prepare", "give_back"} & vars(wing).keys()
        assert bool(prepares) is wing.prepares
    for room in ROOMS:
        folder = Path(agent.__file__).parent / room
        imported = set().union(*(_imports(path) for path in folder.rglob("*.py")))
        assert not imported & (ROOMS - {room}), room


async def test_each_wing_brings_its_resources(tmp_path: Path) -> None:
    settings = Settings(
        cluster=ClusterSettings(access="off"),
        kubelet=Kubelet(root=str(tmp_path / "kubelet")),
        host=HostSettings(
            state=str(tmp_path / "state"), run=str(tmp_path / "run"), cdi=str(tmp_path / "cdi")
        ),
    )
    node = wing_node(settings)
    wings = {each.mode: await each.build(node) for each in WINGS}
    for mode, wing in wings.items():
        names = {plugin.resource for plugin in wing.plugins()}
        assert bool(names) is not bool(mode.row.prefix)  # these come with the instances
        assert names <= set(mode.resources)
        if mode.row.pair:
            assert names == set(mode.resources)
        assert wing.prepares or not mode.row.needs_daemon
        # Only modes of amounts say whether they are enforced.
        assert (wing.enforced() is not None) is (mode.row.pair is not None)
    assert wings[Mode.MPS].enforced() == "no"  # nobody knows the runtime
    node.injector.software = NodeInfo("v1.34.0", "containerd://2.1.0")
    assert wings[Mode.MPS].enforced() == "yes"
