"""The parts of one GPU's daemon that starting and probing share."""

from dataclasses import dataclass

from agent.mps.compute_mode import ExclusiveMode
from agent.mps.control_commands import Control
from agent.mps.directories import Directories
from agent.mps.following import Logs
from agent.mps.options import Options
from agent.mps.status_publisher import Publisher


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """Made by the daemon's supervisor, for as long as it lives."""

    control: Control
    folders: Directories
    exclusive: ExclusiveMode
    logs: Logs
    publisher: Publisher
    options: Options
