"""The running agent as one value, as commands, the demo and tests see it."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.app.build_switching import NodeParts
from agent.app.parts import Core
from agent.cluster.reach import ClusterAccess
from agent.dra.door import DraDoor
from agent.kit.tasks import Cell
from agent.model.holding import Growth, Place
from agent.model.modes import Mode
from agent.modes.desired import DesiredSource
from agent.modes.switcher import ModeSwitcher
from agent.modes.unexplained import Unexplained
from agent.modes.wing import Wing


@dataclass(frozen=True, slots=True)
class Agent:
    core: Core
    wings: Mapping[Mode, Wing]
    desired: DesiredSource
    switcher: ModeSwitcher
    unexplained: Unexplained
    # Bytes by GPU that containers have beyond what their pods asked for.
    grown: Cell[Mapping[Place, Growth]]
    cluster: ClusterAccess | None  # None: there is no way to the Kubernetes API
    node: NodeParts | None  # None: the same
    door: DraDoor | None = None  # None: GPUs are offered by device plugins alone
