"""`kubectl gpu`: arguments and exit codes. 0 done, 1 something failed, 2 bad arguments, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from agent.kubectl.commands import (
    TRY_RESOURCES,
    do_cordon,
    do_explain,
    do_overview,
    do_resize,
    do_switch,
    do_top,
    do_try,
    plain,
)
from agent.kubectl.completion import COMPLETE, NO_FILES, SCRIPT, completions
from agent.kubectl.kube import Kubectl, KubectlFailed
from agent.kubectl.page import do_page

TIMES = {"s": 1, "m": 60, "h": 3600}
PASSED_ON = ("context", "kubeconfig", "cluster", "user", "as")  # flags that kubectl gets as they are


def seconds(text: str) -> float:
    """90s, 10m, 2h or seconds, as a type of an argument."""
    number, factor = (text[:-1], TIMES[text[-1]]) if text[-1:] in TIMES else (text, 1)
    try:
        return float(number) * factor
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90s, 10m or 2h") from error


def plugin_parser() -> argparse.ArgumentParser:
    usual = argparse.ArgumentParser(add_help=False)
    for name in PASSED_ON:
        usual.add_argument(f"--{name}", default=argparse.SUPPRESS, help=f"kubectl's --{name}")
    usual.add_argument("-n", "--namespace", default=argparse.SUPPRESS, help="(default: the context's)")
    parser = argparse.ArgumentParser(
        prog="kubectl gpu", description="The cluster's GPUs, with your own rights.", parents=[usual]
    )
    _documents(parser)
    parser.set_defaults(command=do_overview)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands; without one: the overview of nodes")

    top = commands.add_parser(
        "top", parents=[usual], help="how much of each GPU is allocated, and to whom (not how busy it is)"
    )
    _documents(top, argparse.SUPPRESS)
    top.add_argument("--once", action="store_true", help="print it once and end")
    top.set_defaults(command=do_top)

    explain = commands.add_parser(
        "explain",
        parents=[usual],
        help="why a pod waits, or which GPU and limits it has and who is beside it",
    )
    explain.add_argument("pod", metavar="POD", help="its name, or namespace/name")
    _documents(explain, argparse.SUPPRESS)
    explain.set_defaults(command=do_explain)

    switch = commands.add_parser(
        "switch", parents=[usual], help="say what will drain, then set a node's mode"
    )
    switch.add_argument("node", metavar="NODE")
    switch.add_argument("mode", metavar="MODE", help="pgpu, vgpu, mps, dra, disable, or a layout's name")
    switch.add_argument(
        "--wait", action="store_true", help="until it is in force; 1 if it is blocked or late"
    )
    switch.add_argument("--timeout", type=seconds, default=600.0, metavar="TIME", help="(default: 10m)")
    switch.add_argument("--dry-run", action="store_true", help="say what will drain, and set nothing")
    switch.set_defaults(command=do_switch)

    cordon = commands.add_parser("cordon", parents=[usual], help="offer a GPU no more: it drains")
    uncordon = commands.add_parser("uncordon", parents=[usual], help="offer a cordoned GPU again")
    for each, on in ((cordon, True), (uncordon, False)):
        each.add_argument("gpu", metavar="GPU", help="NODE/INDEX, or its UUID")
        each.set_defaults(command=do_cordon, on=on)
    cordon.add_argument("--reason", default="", metavar="TEXT")

    resize = commands.add_parser("resize", parents=[usual], help="change the share of a running container")
    resize.add_argument("pod", metavar="POD", help="its name, or namespace/name")
    resize.add_argument("-c", "--container", metavar="NAME", help="(default: the first with limits)")
    resize.add_argument("--memory", type=int, metavar="UNITS", help="units of its resource of memory")
    resize.add_argument("--cores", type=int, metavar="PERCENT")
    resize.set_defaults(command=do_resize)

    trial = commands.add_parser(
        "try", parents=[usual], help="have a pod ask for a share, and show what it sees"
    )
    trial.add_argument("--mode", choices=sorted(TRY_RESOURCES), default="vgpu", help="(default: %(default)s)")
    trial.add_argument("--image", default="busybox:stable", help="one with a shell (default: %(default)s)")
    trial.add_argument("--runtime-class", metavar="NAME", help="where pods with GPUs need one")
    trial.add_argument("--timeout", type=seconds, default=120.0, metavar="TIME", help="(default: 2m)")
    trial.set_defaults(command=do_try)

    page = commands.add_parser(
        "page", parents=[usual], help="serve a page of the cluster's GPUs on localhost"
    )
    page.add_argument("--port", type=int, default=0, help="(default: any free one)")
    page.set_defaults(command=do_page)

    completion = commands.add_parser(
        "completion", help="print the program that kubectl asks for completion: kubectl_complete-gpu"
    )
    completion.set_defaults(command=do_completion)
    return parser


def do_completion(kubectl: Kubectl, options: argparse.Namespace) -> int:
    del kubectl, options
    print(SCRIPT, end="")
    return 0


def _documents(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """`default` SUPPRESS: what stands before the command counts, too."""
    parser.add_argument("-o", "--output", choices=["json"], default=default, help="as a document")
    parser.add_argument(
        "-w",
        "--watch",
        action="store_true",
        default=default or False,
        help="go on and show changes until interrupted",
    )


def plugin_main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [COMPLETE]:
        try:
            print(*completions(plugin_parser(), arguments[1:], PASSED_ON), NO_FILES, sep="\n", flush=True)
        except BrokenPipeError:
            return _nobody_reads()
        return 0
    options = plugin_parser().parse_args(arguments)
    flags = [f"--{name}={getattr(options, name)}" for name in PASSED_ON if hasattr(options, name)]
    kubectl = Kubectl(flags)
    try:
        options.namespace = getattr(options, "namespace", None) or kubectl.namespace()
        code: int = options.command(kubectl, options)
        sys.stdout.flush()
    except KubectlFailed as error:
        print(plain(str(error)), file=sys.stderr)
        return 1
    except BrokenPipeError:
        return _nobody_reads()
    except KeyboardInterrupt:
        return 130
    return code


def _nobody_reads() -> int:
    """Who read has left, as head does; the interpreter must not say so when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


if __name__ == "__main__":
    sys.exit(plugin_main())
