"""`status`, `clear-health`, `release`, `cordon`, `top` on the command line: arguments, output, exit codes."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agent.cli.arguments import Commands, add_configuration, load
from agent.cli.arguments import duration as as_seconds
from agent.status import client, top_table
from agent.status.table import duration, render
from agent.web.control import NAME


def add_commands(commands: Commands) -> None:
    status = commands.add_parser("status", help="show the GPUs of this node, their health and their holders")
    status.add_argument("--json", action="store_true", help="the whole report as JSON")
    clear = commands.add_parser("clear-health", help="declare an unhealthy GPU healthy, after it was reset")
    clear.add_argument("gpu", metavar="GPU", help="index or UUID")
    clear.add_argument(
        "--removed", action="store_true", help="forget a lost GPU: it was taken out of the machine"
    )
    release = commands.add_parser(
        "release", help="let go of the driver for maintenance: NVML closed, all units Unhealthy"
    )
    how = release.add_mutually_exclusive_group(required=True)
    how.add_argument("--for", dest="seconds", type=as_seconds, metavar="TIME", help="90s, 10m or 2h")
    how.add_argument("--end", action="store_true", help="serve again now")
    cordon = commands.add_parser(
        "cordon", help="take one GPU off the lists: it drains and is offered no more"
    )
    uncordon = commands.add_parser("uncordon", help="offer a cordoned GPU again")
    for each in (cordon, uncordon):
        each.add_argument("gpu", metavar="GPU", help="index or UUID")
    cordon.add_argument("--reason", default="", metavar="TEXT", help="why, for status and the Node object")
    live = commands.add_parser("top", help="watch utilisation and memory of GPUs and containers")
    live.add_argument("--once", action="store_true", help="print them once and end")
    live.add_argument("--json", action="store_true", help="print them once as JSON")
    live.add_argument(
        "--every", type=as_seconds, default=2.0, metavar="TIME", help="between two looks (default: 2s)"
    )
    actions = (
        *((status, _status), (clear, _clear), (release, _release), (live, _top)),
        *((cordon, _cordon), (uncordon, _uncordon)),
    )
    for parser, action in actions:
        add_configuration(parser)
        parser.set_defaults(command=_over_socket(action))


def _over_socket(action: Callable[[Path, argparse.Namespace], str]) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        path = Path(load(options).host.run) / NAME
        try:
            print(action(path, options))
        except (client.AgentUnreachable, client.AgentRefused) as error:
            print(error, file=sys.stderr)
            return 1
        return 0

    return run


def _status(path: Path, options: argparse.Namespace) -> str:
    document = client.ask(path, "status")
    if options.json:
        return json.dumps(document, indent=2)
    return render(document, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _top(path: Path, options: argparse.Namespace) -> str:
    """Repaint until interrupted; without a terminal, print once."""
    shown = client.ask(path, "top")
    if options.json:
        return json.dumps(shown, indent=2)
    while not options.once and sys.stdout.isatty():
        # Home, then each line erased to its end, then what is below: no flicker as with a cleared screen.
        text = top_table.render(shown).replace("\n", "\033[K\n")
        print(f"\033[H{text}\033[K\033[J", end="", flush=True)
        time.sleep(options.every)
        shown = client.ask(path, "top")
    return top_table.render(shown)


def _clear(path: Path, options: argparse.Namespace) -> str:
    cleared = client.ask(path, "clear-health", gpu=options.gpu, removed=options.removed)
    if options.removed:
        return f"GPU {cleared['index']} ({cleared['uuid']}) is forgotten; it was: {cleared['was']}"
    return f"GPU {cleared['index']} ({cleared['uuid']}) is declared healthy; it was: {cleared['was']}"


def _cordon(path: Path, options: argparse.Namespace) -> str:
    done = client.ask(path, "cordon", gpu=options.gpu, reason=options.reason)
    text = f"GPU {done['index']} ({done['uuid']}) is cordoned: it is offered no more"
    pods = ", ".join(done["waitingFor"])
    return f"{text}; pods on it go on until they end: {pods}" if pods else text


def _uncordon(path: Path, options: argparse.Namespace) -> str:
    done = client.ask(path, "uncordon", gpu=options.gpu)
    return f"GPU {done['index']} ({done['uuid']}) is offered again; it was {done['was']}"


def _release(path: Path, options: argparse.Namespace) -> str:
    if options.end:
        client.ask(path, "release", end=True)
        return "NVML is opened again; GPUs return as they answer"
    client.ask(path, "release", deadline=client.RELEASE_SECONDS, seconds=options.seconds)
    return (
        f"released for {duration(options.seconds)}: no unit of this node is handed out, NVML is closed.\n"
        "Running pods keep their GPUs. After a reset: gpu-node-agent clear-health GPU\n"
        "To serve again sooner: gpu-node-agent release --end"
    )
