"""The command line: arguments and exit codes only.

0 done, 1 something failed, 2 bad arguments or configuration.
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import structlog

from agent import __version__, settings
from agent.cli import check as checks
from agent.cli import cleanup, extender
from agent.cli import status as shell
from agent.kit import logs
from agent.kit.cell import Cell
from agent.kit.descriptors import raise_limit
from agent.kit.supervise import FatalError, describe
from agent.nvml.port import NvmlPort

if TYPE_CHECKING:
    from agent.app.reload import Reloader

# A stop that takes longer is ended the hard way, before the kubelet does so: the chart gives 10 s.
STOP_SECONDS = 9.5

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
    except settings.ConfigurationError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-node-agent", description="GPU sharing for one Kubernetes node."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="serve this node until told to stop")
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
    loaded = _load(options)
    logs.configure(loaded.logging.level, loaded.logging.format)
    raise_limit()
    try:
        anyio.run(_serve, loaded, _nvml(loaded, options.simulated_machine), options)
    except Exception as error:  # the last line of defence
        foreseen = all(isinstance(leaf, FatalError) for leaf in _leaves(error))
        problem = "; ".join(str(leaf) if foreseen else describe(leaf) for leaf in _leaves(error))
        log.critical("agent_failed", problem=problem, exc_info=None if foreseen else error)
        return 1
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _nvml(loaded: settings.Settings, simulated: Path | None) -> NvmlPort:
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


async def _serve(loaded: settings.Settings, nvml: NvmlPort, options: argparse.Namespace) -> None:
    # `check` and `version` answer without loading the agent.
    from agent.app import run as app  # noqa: PLC0415
    from agent.app.reload import Reloader  # noqa: PLC0415

    stop, hangups = anyio.Event(), Cell(0)
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    with anyio.open_signal_receiver(*watched) as signals:
        async with anyio.create_task_group() as obeying:
            obeying.start_soon(_obey, signals, stop, hangups)
            with contextlib.suppress(app.StoppedEarly):
                async with app.running(loaded, nvml, stop) as agent, anyio.create_task_group() as group:
                    reloader = Reloader(agent, lambda: _load(options), _file(options))
                    spawn = agent.supervisor.restarting
                    group.start_soon(spawn, "configuration", reloader.run)
                    group.start_soon(spawn, "reload on SIGHUP", _reload, reloader, hangups)
                    # What lives now lives for ever: full collections need not look at it again.
                    gc.collect()
                    gc.freeze()
                    try:
                        await stop.wait()
                    finally:
                        if not stop.is_set():  # a fatal task failed: what hangs must not keep the rest alive
                            _end_the_hard_way_after(STOP_SECONDS)
                    group.cancel_scope.cancel()
            if not stop.is_set():
                raise FatalError("the agent ended though nobody had told it to")
            obeying.cancel_scope.cancel()


async def _obey(signals: AsyncIterator[signal.Signals], stop: anyio.Event, hangups: Cell[int]) -> None:
    """Answer signals from the first moment on: a start may wait for a lock, a driver or an API server."""
    async for number in signals:
        log.info("signal_received", signal=signal.Signals(number).name)
        if number == signal.SIGHUP:
            hangups.publish(hangups.version + 1)
        elif stop.is_set():
            log.error("stopped_at_once", reason="a second signal came while the agent was stopping")
            os._exit(1)
        else:
            _end_the_hard_way_after(STOP_SECONDS)
            stop.set()


async def _reload(reloader: "Reloader", hangups: Cell[int]) -> None:
    seen = 0
    while True:
        seen = await hangups.wait_change(seen)
        await reloader.reload()


def _end_the_hard_way_after(seconds: float) -> None:
    def end() -> None:
        log.error("stop_stalled", seconds=seconds, remedy="see what hangs in the lines before")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
