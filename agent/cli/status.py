"""`status`, `clear-health`, `release`, `cordon`, `top` on the command line: arguments, output, exit codes."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agent.cli.arguments import Commands, add_configuration, load
from agent.cli.arguments import duration as as_seconds
from agent.cli.output import Document, Render, add_output, add_watch, formatted, painted, show, size
from agent.status import top_table
from agent.status.table import duration, render
from agent.web import control
from agent.web.control import NAME


def add_commands(commands: Commands) -> None:
    status = commands.add_parser("status", help="show the GPUs of this node, their health and their holders")
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
    live.add_argument(
        "--every", type=as_seconds, default=2.0, metavar="TIME", help="between two looks (default: 2s)"
    )
    add_watch(status, "you interrupt it")
    add_watch(cordon, "no pod holds the GPU")
    actions = (
        *((status, _status), (clear, _clear), (release, _release), (live, _top)),
        *((cordon, _cordon), (uncordon, _uncordon)),
    )
    for parser, action in actions:
        add_configuration(parser)
        add_output(parser, wide=parser in (status, live))
        parser.set_defaults(command=_over_socket(action))


def _over_socket(action: Callable[[Path, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        path = Path(load(options).host.run) / NAME
        try:
            return action(path, options)
        except (control.AgentUnreachable, control.AgentRefused) as error:
            print(error, file=sys.stderr)
            return 1

    return run


def _status(path: Path, options: argparse.Namespace) -> int:
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def text(document: Document) -> str:
        columns = None if options.output == "wide" else size()[0]
        return render(document, colours=colours, columns=columns)

    return show(options, lambda: control.ask(path, "status"), text)


def _top(path: Path, options: argparse.Namespace) -> int:
    """Repaint until interrupted; without a terminal, print once."""

    def text(document: Document) -> str:
        columns, rows = size(fewest=1)  # a longer line would take two rows
        if not rows or options.output == "wide":
            return top_table.render(document)
        return top_table.render(document, columns, 0 if options.once else rows)

    while options.output in (None, "wide") and not options.once and sys.stdout.isatty():
        print(painted(text(control.ask(path, "top"))), end="", flush=True)
        time.sleep(options.every)
    return show(options, lambda: control.ask(path, "top"), text)


def _clear(path: Path, options: argparse.Namespace) -> int:
    def text(done: Document) -> str:
        if options.removed:
            return f"GPU {done['index']} ({done['uuid']}) is forgotten; it was: {done['was']}"
        return f"GPU {done['index']} ({done['uuid']}) is declared healthy; it was: {done['was']}"

    return _say(options, control.ask(path, "clear-health", gpu=options.gpu, removed=options.removed), text)


def _cordon(path: Path, options: argparse.Namespace) -> int:
    done = control.ask(path, "cordon", gpu=options.gpu, reason=options.reason)

    def still() -> Document:
        if not options.watch:
            return done
        now = control.ask(path, "status")
        gpus = [gpu for gpu in now["gpus"] if gpu["uuid"] == done["uuid"]]
        pods = sorted({pod["pod"] for gpu in gpus for pod in gpu["holders"]})
        age = now["holdersAgeSeconds"]
        return {**done, "waitingFor": pods if now["holdersKnown"] else None, "holdersAgeSeconds": age}

    def ended(found: Document) -> bool:
        return found["waitingFor"] == [] and found["holdersAgeSeconds"] is None

    return show(options, still, _cordoned, ended)


def _cordoned(done: Document) -> str:
    text = f"GPU {done['index']} ({done['uuid']}) is cordoned: it is offered no more"
    if done["waitingFor"] is None:
        return f"{text}; which pods are on it is not known: the kubelet has not said so yet"
    if pods := ", ".join(done["waitingFor"]):
        text += f"; pods on it go on until they end: {pods}"
    if (age := done["holdersAgeSeconds"]) is not None:
        text += f"; the kubelet does not say now which pods are on it, this is {age:g} s old"
    return text


def _uncordon(path: Path, options: argparse.Namespace) -> int:
    def text(done: Document) -> str:
        return f"GPU {done['index']} ({done['uuid']}) is offered again; it was {done['was']}"

    return _say(options, control.ask(path, "uncordon", gpu=options.gpu), text)


def _release(path: Path, options: argparse.Namespace) -> int:
    if options.end:
        done = control.ask(path, "release", end=True)
        return _say(options, done, lambda _: "NVML is opened again; GPUs return as they answer")
    done = control.ask(path, "release", deadline=control.RELEASE_SECONDS, seconds=options.seconds)
    return _say(
        options,
        done,
        lambda _: (
            f"released for {duration(options.seconds)}: no unit of this node is handed out, NVML is closed.\n"
            "Running pods keep their GPUs. After a reset: gpu-node-agent clear-health GPU\n"
            "To serve again sooner: gpu-node-agent release --end"
        ),
    )


def _say(options: argparse.Namespace, done: Document, text: Render) -> int:
    print(formatted(done, options, text))
    return 0
