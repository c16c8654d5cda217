"""`gpu-node-agent try`: arguments, output, exit codes.

Exit codes: 0 the container saw its share, 1 it did not or it could not be tried, 2 bad arguments,
130 interrupted.
"""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from agent.cli.arguments import Commands, add_kubeconfig, duration, kubeconfig, namespace
from agent.cli.running import INTERRUPTED, in_cluster
from agent.model.modes import OFFERED_MODES, Mode

if TYPE_CHECKING:
    from agent.cluster.api import KubeApi


def add_commands(commands: Commands) -> None:
    parser = commands.add_parser("try", help="have a pod ask for a share, and list its devices")
    modes = [mode.value for mode in OFFERED_MODES]
    parser.add_argument("--mode", choices=modes, help="default: the first that a node offers")
    parser.add_argument(
        "-n", "--namespace", type=namespace, default="default", help="of the pod (default: %(default)s)"
    )
    parser.add_argument("--node", help="the node to try (default: any)")
    parser.add_argument(
        "--image", help="one with a shell (default: the agent's own, which the nodes have already)"
    )
    parser.add_argument("--runtime-class", metavar="NAME", help="where pods with GPUs need one")
    parser.add_argument(
        "--timeout", type=duration, default=120.0, metavar="TIME", help="for the pod (default: 2m)"
    )
    add_kubeconfig(parser)
    # The pod's own command.
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(command=_try)


def _try(options: argparse.Namespace) -> int:
    if options.inside:
        from agent.check.probe import seen  # noqa: PLC0415  not needed by the agent itself

        for line in seen():
            print(line, flush=True)
        return 0
    from agent.check.trial import TrialFailed, TrialOptions, attempt  # noqa: PLC0415

    chosen = TrialOptions(
        Mode(options.mode) if options.mode else None,
        options.namespace,
        options.node,
        options.image,
        options.runtime_class,
        options.timeout,
    )

    async def act(api: "KubeApi") -> int:
        try:
            await attempt(api, chosen, partial(print, flush=True))
        except TrialFailed as error:
            print(error, file=sys.stderr)
            return 1
        return 0

    code = in_cluster(kubeconfig(options), act, remedy="; name a kubeconfig with --kubeconfig")
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code
