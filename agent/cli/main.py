"""The command line: arguments and exit codes only.

0 done, 1 something failed, 2 bad arguments or configuration.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agent import __version__, settings
from agent.cli import check as checks
from agent.cli import cleanup, extender, fault, try_share
from agent.cli import status as shell
from agent.cli.run import Start, run_command
from agent.kit.supervise import FatalError
from agent.nvml.port import NvmlPort


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except settings.ConfigurationError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return 2
    except FatalError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-node-agent", description="GPU sharing for one Kubernetes node."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="serve this node until a signal ends it")
    _configuration_arguments(run)
    run.add_argument(
        "--mode-file",
        type=Path,
        metavar="FILE",
        help="a file with one word, the mode, in place of the node's label (as --set modeFile=FILE)",
    )
    # For tests and the demo: a simulated machine's state file in place of NVML.
    run.add_argument("--simulated-machine", type=Path, help=argparse.SUPPRESS)
    run.set_defaults(command=_run)

    check = commands.add_parser("check", help="say what is wrong with a configuration, a node, ConfigMaps")
    _configuration_arguments(check)
    check.set_defaults(command=_check)
    checks.add_commands(check, _configuration_arguments, _load, lambda loaded: _nvml(loaded, None))

    shell.add_commands(commands, _configuration_arguments, _load)
    extender.add_commands(commands, _configuration_arguments)
    cleanup.add_commands(commands, _configuration_arguments, _load, lambda loaded: _nvml(loaded, None))

    fault.add_commands(commands, _configuration_arguments, _load)
    try_share.add_commands(commands)

    simulate = commands.add_parser(
        "simulate", help="run the agent on a simulated machine and show what happens"
    )
    simulate.add_argument("--profile", default="dgx-h200", help="the machine (default: %(default)s)")
    simulate.set_defaults(command=_simulate)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _configuration_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="configuration file (YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one key, wins over file and environment",
    )


def _load(options: argparse.Namespace) -> settings.Settings:
    flags = list(options.set)
    if mode_file := getattr(options, "mode_file", None):
        flags.append(f"modeFile={mode_file.absolute()}")
    return settings.load(_file(options), os.environ, flags)


def _file(options: argparse.Namespace) -> Path | None:
    named = os.environ.get(settings.ENVIRONMENT_PREFIX + "CONFIG")
    given: Path | None = options.config
    return given or (Path(named) if named else None)


def _check(options: argparse.Namespace) -> int:
    _load(options)
    print("the configuration is good")
    return 0


def _version(_: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from agent.simulator import demo  # noqa: PLC0415  the node agent itself never loads the simulator

    return demo.main(options.profile)


def _run(options: argparse.Namespace) -> int:
    return run_command(
        Start(lambda: _load(options), lambda loaded: _nvml(loaded, options.simulated_machine), _file(options))
    )


def _nvml(loaded: settings.Settings, simulated: Path | None) -> NvmlPort:
    if loaded.simulator.profile is not None:
        from agent.simulator.nvml import SimulatedNvml  # noqa: PLC0415  as above
        from agent.simulator.on_node import NotSimulated, machine_of  # noqa: PLC0415

        try:
            return SimulatedNvml(machine_of(loaded))
        except NotSimulated as error:
            raise FatalError(str(error)) from error
    if simulated is not None:
        from agent.simulator.machine import SimulatedMachine  # noqa: PLC0415  as above
        from agent.simulator.nvml import SimulatedNvml  # noqa: PLC0415

        return SimulatedNvml(SimulatedMachine.attach(simulated))
    from agent.nvml.binding import Binding  # noqa: PLC0415  pynvml is not needed under the simulator

    library = loaded.driver.library
    return Binding(
        path=Path(library) if library else None,
        roots=(Path(loaded.driver.root),),
        sysfs=Path(loaded.host.sysfs),
    )
