"""`gpu-node-agent extender` and `gpu-node-agent explain`: arguments and exit codes only."""

import argparse
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import anyio
import structlog

from agent.cli.arguments import Commands, add_configuration, add_kubeconfig, configuration_file, kubeconfig
from agent.cli.output import Document, add_output, add_watch, show
from agent.cli.running import exit_code
from agent.kit import logs

if TYPE_CHECKING:
    from agent.extender.settings import ExtenderSettings
    from agent.kit.tasks import Cell

log = structlog.get_logger()

LISTS_SECONDS = 60.0  # that the lists of a whole cluster may take while nobody looks for garbage


def add_commands(commands: Commands) -> None:
    extender = commands.add_parser("extender", help="choose node and GPUs of a pod for kube-scheduler")
    add_configuration(extender)
    extender.set_defaults(command=_extender)
    explain = commands.add_parser("explain", help="say why a pod waits or died at admission")
    explain.add_argument("pod", metavar="POD", help="its name, or namespace/name")
    explain.add_argument("-n", "--namespace", default="default", help="(default: %(default)s)")
    add_kubeconfig(explain)
    add_output(explain)
    add_watch(explain, "the pod is bound")
    explain.set_defaults(command=_explain)


def _extender(options: argparse.Namespace) -> int:
    from agent.extender import settings  # noqa: PLC0415  the node agent never loads the extender

    file = configuration_file(options, settings.ENVIRONMENT_PREFIX)
    loaded = settings.load(file, os.environ, options.set)
    logs.configure(loaded.logging.level, loaded.logging.format)
    return exit_code("extender_failed", _serve, loaded)


async def _serve(loaded: "ExtenderSettings") -> None:
    from agent.extender.app import running  # noqa: PLC0415  as above

    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with running(loaded, keep=keep_heap):
            async for number in signals:
                log.info("signal_received", signal=signal.Signals(number).name)
                break


async def keep_heap(complete: "Cell[bool]") -> None:
    """Spare a ledger the search for garbage while it is read, and from then on until cancelled.

    `complete`: whether it has all nodes and bound pods. Of 10,000 nodes each full collection takes a tenth to
    half of a second; some fell into calls.
    """
    gc.collect()  # a ledger before this one goes by that alone
    gc.disable()
    try:
        with anyio.move_on_after(LISTS_SECONDS):
            await complete.wait_for(bool)
    finally:
        gc.enable()
    await complete.wait_for(bool)
    gc.collect()
    gc.freeze()
    try:
        await anyio.sleep_forever()
    finally:
        gc.unfreeze()


def _explain(options: argparse.Namespace) -> int:
    from agent.extender.explain import CannotExplain, explained  # noqa: PLC0415  as above

    namespace, _, name = options.pod.rpartition("/")

    def ask() -> Document:
        return anyio.run(explained, namespace or options.namespace, name, kubeconfig(options))

    try:
        return show(
            options, ask, lambda document: "\n".join(document["lines"]), lambda document: document["bound"]
        )
    except CannotExplain as error:
        print(error, file=sys.stderr)
        return 1
