"""Arguments that several commands have, and the meaning of those that name a configuration."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from agent import settings
from agent.kit.tasks import FatalError
from agent.nvml.port import NvmlPort

Commands = Any  # argparse's action for subcommands, whose type has no public name


def add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="configuration file (YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key, wins over file and environment",
    )


def configuration_file(options: argparse.Namespace, prefix: str = settings.ENVIRONMENT_PREFIX) -> Path | None:
    """The file of --config, or of the environment's `<prefix>CONFIG`."""
    named = os.environ.get(prefix + "CONFIG")
    given: Path | None = options.config
    return given or (Path(named) if named else None)


def load(options: argparse.Namespace) -> settings.Settings:
    """The node agent's configuration. Raises ConfigurationError."""
    flags = list(options.set)
    if mode_file := getattr(options, "mode_file", None):
        flags.append(f"modeFile={mode_file.absolute()}")
    return settings.load(configuration_file(options), os.environ, flags)


def nvml_of(loaded: settings.Settings, simulated: Path | None = None) -> NvmlPort:
    """The driver's library, or the simulator: by `simulator.profile`, or by the state file of a machine."""
    if loaded.simulator.profile is not None:
        from agent.simulator.nvml import SimulatedNvml  # noqa: PLC0415  the agent itself never loads it
        from agent.simulator.on_node import NotSimulated, machine_of  # noqa: PLC0415

        try:
            return SimulatedNvml(machine_of(loaded))
        except NotSimulated as error:
            raise FatalError(str(error)) from error
    if simulated is not None:
        from agent.simulator.machine import SimulatedMachine  # noqa: PLC0415  as above
        from agent.simulator.nvml import SimulatedNvml  # noqa: PLC0415

        return SimulatedNvml(SimulatedMachine.attach(simulated))
    from agent.nvml.binding import NvmlBinding  # noqa: PLC0415  pynvml is not needed under the simulator

    library = loaded.driver.library
    return NvmlBinding(
        path=Path(library) if library else None,
        roots=(Path(loaded.driver.root),),
        sysfs=Path(loaded.host.sysfs),
    )


def add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="(default: as kubectl: $KUBECONFIG, a list of files, else ~/.kube/config; in a pod its account)",
    )


def kubeconfig(options: argparse.Namespace) -> Path | None:
    """The file to use by kubectl's rules, or a list of files as in $KUBECONFIG; None: the pod's account."""
    known = os.environ.get("KUBECONFIG")
    given: Path | None = options.kubeconfig
    if given or known:
        return given or Path(known or "")
    usual = Path("~/.kube/config").expanduser()
    return usual if usual.is_file() else None


def namespace(text: str) -> str:
    """A namespace's name, as a type of an argument: it becomes a part of paths."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a namespace")
    return text


def duration(text: str) -> float:
    """Seconds of 90s, 10m, 2h or of a plain number, as a type of an argument."""
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    number = text[:-1] if factor else text
    if not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90s, 10m or 2h")
    return float(number) * (factor or 1)
