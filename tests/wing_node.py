"""A node for wings and their plugins, of which a test names the parts that matter to it."""

from typing import Any

from agent.app.run import core_of
from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.model.modes import Assignment
from agent.modes.desired import DesiredSource, catalog_of
from agent.modes.wing import Node
from agent.pairing.pairing import Recorder
from agent.pairing.pod_source import PodSource
from agent.settings import Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.telemetry.container_use import Uses


def wing_node(settings: Settings, **parts: Any) -> Node:
    """`parts`: fields of Node. The others are of a simulated machine, with no way to the Kubernetes API."""
    core = core_of(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200")))
    if "calls" not in parts:
        core.calls.close()
    defaults: dict[str, Any] = {
        "settings": settings,
        "name": "",
        "snapshot": Cell(Snapshot()),
        "assignment": Cell(Assignment()),
        "desired": DesiredSource(catalog_of(settings)),
        "holdings": core.holdings,
        "injector": Injector(settings),
        "pods": PodSource(),
        "recorder": Recorder(),
        "cluster": None,
        "uses": Cell(Uses()),
        "nvml": core.nvml,
        "calls": core.calls,
        "supervisor": core.supervisor,
        "grown": Cell({}),
        "read_again": lambda: None,
    }
    return Node(**defaults | parts)
