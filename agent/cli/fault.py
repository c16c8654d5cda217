"""`gpu-node-agent fault ...`: something goes wrong with a simulated GPU. Refused where GPUs are real.

Exit codes: 0 done, 1 it cannot be done here, 2 bad arguments or configuration.
"""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.cli.arguments import Commands, add_configuration, load

if TYPE_CHECKING:
    from agent.simulator.machine import SimulatedMachine

Act = Callable[["SimulatedMachine", int, argparse.Namespace], None]


def add_commands(commands: Commands) -> None:
    fault = commands.add_parser("fault", help="let a simulated GPU fail (simulator.profile)")
    kinds = fault.add_subparsers(required=True, metavar="KIND")
    xid = kinds.add_parser("xid", help="the driver reports an Xid, such as 79 (fallen off the bus)")
    xid.add_argument("number", type=int, metavar="NUMBER")
    actions: tuple[tuple[argparse.ArgumentParser, Act], ...] = (
        (xid, lambda machine, gpu, options: machine.xid(gpu, options.number)),
        (
            kinds.add_parser("lose", help="it answers no more, and nobody says so"),
            lambda machine, gpu, _: machine.lose(gpu),
        ),
        (
            kinds.add_parser("ecc", help="an uncorrectable memory error"),
            lambda machine, gpu, _: machine.ecc_double(gpu),
        ),
        (
            kinds.add_parser("repair", help="it is back, as after a reset"),
            lambda machine, gpu, _: machine.restore(gpu),
        ),
    )
    for parser, act in actions:
        add_configuration(parser)
        parser.add_argument("--gpu", required=True, help="index or UUID")
        parser.set_defaults(command=_on_machine(act))


def _on_machine(act: Act) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        from agent.simulator.on_node import NotSimulated, attached  # noqa: PLC0415  not for other commands

        try:
            machine = attached(load(options))
            gpu = machine.slot(int(options.gpu) if options.gpu.isdigit() else options.gpu)
            act(machine, gpu, options)
        except (NotSimulated, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"simulated GPU {gpu} ({machine.gpu(gpu).uuid.decode()}): done")
        return 0

    return run
