"""The command line: arguments and exit codes only.

0 done, 1 something failed, 2 bad arguments or configuration, 130 interrupted, 141 who read the output left.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agent import __version__, settings
from agent.cli import check as checks
from agent.cli import cleanup, completion, extender, fault, status, try_share
from agent.cli.arguments import add_configuration, configuration_file, load, nvml_of
from agent.cli.output import add_output, formatted
from agent.cli.serve import Start, run_command
from agent.kit.tasks import FatalError

CLOSED_PIPE = 141  # 128 and the number of SIGPIPE, as of other programs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who read has left, as head does; the interpreter must not say so when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
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
    add_configuration(run)
    run.add_argument(
        "--mode-file",
        type=Path,
        metavar="FILE",
        help="a file with one word, the mode, in place of the node's label (as --set modeFile=FILE)",
    )
    # For tests and the demo: a simulated machine's state file in place of NVML.
    run.add_argument("--simulated-machine", type=Path, help=argparse.SUPPRESS)
    run.set_defaults(command=_run)

    check = commands.add_parser("check", help="find faults of a configuration, a node, ConfigMaps")
    add_configuration(check)
    check.set_defaults(command=_check)
    checks.add_commands(check)
    for each in (status, extender, cleanup, fault, try_share):
        each.add_commands(commands)

    simulate = commands.add_parser(
        "simulate", help="run the agent on a simulated machine and show what happens"
    )
    simulate.add_argument("--profile", default="dgx-h200", help="the machine (default: %(default)s)")
    simulate.add_argument(
        "--page", action="store_true", help="then serve the node's page on localhost until interrupted"
    )
    simulate.set_defaults(command=_simulate)

    version = commands.add_parser("version", help="print the version")
    add_output(version)
    version.set_defaults(command=_version)
    completion.add_commands(commands, parser)
    return parser


def _check(options: argparse.Namespace) -> int:
    load(options)
    print("the configuration is good")
    return 0


def _version(options: argparse.Namespace) -> int:
    print(formatted({"version": __version__}, options, lambda document: str(document["version"])))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from agent.simulator import demo  # noqa: PLC0415  the node agent itself never loads the simulator

    return demo.main(options.profile, options.page)


def _run(options: argparse.Namespace) -> int:
    return run_command(
        Start(
            lambda: load(options),
            lambda loaded: nvml_of(loaded, options.simulated_machine),
            configuration_file(options),
        )
    )
