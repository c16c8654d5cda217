"""`gpu-node-agent check [configmaps | compat | node | nodes]`: arguments, output, exit codes.

Exit codes: 0 good, 1 something is wrong, 2 bad arguments or configuration, 3 unstable (compat) or not all
could be looked at (node, nodes).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import anyio

from agent.cli.arguments import add_configuration, add_kubeconfig, kubeconfig, load, nvml_of
from agent.cli.output import Document, add_output, formatted
from agent.cli.running import in_cluster
from agent.model import cuda
from agent.model.look import Severity, verdict
from agent.model.modes import OFFERED_MODES
from agent.nvml.port import NvmlError

CODES = {cuda.Level.ALLOWED: 0, cuda.Level.UNSTABLE: 3, cuda.Level.BLOCKED: 1}


def add_commands(check: argparse.ArgumentParser) -> None:
    """Add the parts of `check`; without a part it checks the configuration alone."""
    parts = check.add_subparsers(metavar="PART")

    maps = parts.add_parser("configmaps", help="cf-crl ConfigMaps of the platform, own or of other devices")
    maps.add_argument("paths", nargs="*", type=Path, help="files, or folders of files (YAML, JSON)")
    maps.add_argument("--cluster", action="store_true", help="those of the cluster, in kube-public")
    add_kubeconfig(maps)
    add_output(maps)
    maps.set_defaults(command=_configmaps)

    cuda = parts.add_parser("compat", help="whether images of a CUDA version run on a driver")
    cuda.add_argument("--runtime", required=True, type=_version, help="CUDA version of the image (12.4)")
    cuda.add_argument(
        "--driver", type=_driver, help="its number (550.144.03) or CUDA version; default: this node's"
    )
    cuda.add_argument(
        "--mode", choices=[mode.value for mode in OFFERED_MODES], default="pgpu", help="default: %(default)s"
    )
    cuda.add_argument("--compute-capability", type=_version, metavar="X.Y", help="of the GPU (mps)")
    add_configuration(cuda)
    add_output(cuda)
    cuda.set_defaults(command=_compat)

    node = parts.add_parser("node", help="obstacles of this node to offering its GPUs")
    add_configuration(node)
    add_output(node)
    node.add_argument(
        "--host-root",
        type=Path,
        metavar="FOLDER",
        help="where the node's root is mounted; default: as the configuration shows it",
    )
    node.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help="also write all findings but ok, and the last line, there",
    )
    # For the chart's test: without `help`, none lists it.
    nodes = parts.add_parser("nodes", description="The findings of preflight DaemonSets' pods (helm test).")
    nodes.add_argument("--namespace", required=True, help="of the DaemonSets")
    nodes.add_argument("--daemonset", required=True, action="append", metavar="NAME", help="for each pool")
    nodes.add_argument("--timeout", type=float, default=120.0, help="seconds (default: 120)")
    nodes.set_defaults(command=_nodes)
    node.set_defaults(command=_node)


def _version(text: str) -> cuda.Version:
    try:
        return cuda.parse_version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _driver(text: str) -> cuda.DriverFacts:
    try:
        return cuda.parse_driver(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _configmaps(options: argparse.Namespace) -> int:
    from agent.check import configmaps  # noqa: PLC0415  loads the API client

    if not options.paths and not options.cluster:
        print("name files or folders, or give --cluster", file=sys.stderr)
        return 2
    try:
        found = configmaps.from_files(options.paths)
        if options.cluster:
            found += configmaps.from_cluster(kubeconfig(options))
    except configmaps.SourceUnreadable as error:
        print(error, file=sys.stderr)
        return 2
    faults = [str(fault) for fault in configmaps.faults(found)]
    document = {"configMaps": len(found), "faults": faults}
    words = [*faults, f"{len(found)} cf-crl ConfigMaps, {len(faults)} faults"]
    print(formatted(document, options, lambda _: "\n".join(words)))
    return 1 if faults else 0


def _compat(options: argparse.Namespace) -> int:
    settings = load(options)
    driver: cuda.DriverFacts | None = options.driver
    if driver is None:
        library = nvml_of(settings)
        try:
            found = library.open()
        except NvmlError as error:
            print(f"this node's driver cannot be asked ({error}); name one with --driver", file=sys.stderr)
            return 2
        library.close()
        driver = cuda.DriverFacts(found.cuda_version, int(found.version.partition(".")[0]))
    hooked = cuda.hooked(settings.vgpu.enforcement, settings.vgpu.library)
    findings = cuda.findings(options.runtime, driver, options.mode, options.compute_capability, hooked=hooked)
    verdict = cuda.verdict(findings)
    document = {
        "verdict": verdict.name.lower(),
        "runtime": cuda.dotted(options.runtime),
        "mode": options.mode,
        "driverCuda": cuda.dotted(driver.cuda),
        "findings": [
            {"level": each.level.name.lower(), "rule": each.rule, "text": each.text} for each in findings
        ],
    }
    print(formatted(document, options, _compat_text))
    return CODES[verdict]


def _compat_text(document: Document) -> str:
    head = (
        f"{document['verdict']}: CUDA {document['runtime']} in mode {document['mode']} "
        f"on a driver for CUDA {document['driverCuda']}"
    )
    return "\n".join(
        [head, *(f"  {each['level']:8}  {each['rule']:7}  {each['text']}" for each in document["findings"])]
    )


def _node(options: argparse.Namespace) -> int:
    from agent.check.host import host_of  # noqa: PLC0415  not needed by the agent itself
    from agent.check.node_check import look, observe  # noqa: PLC0415

    settings = load(options)
    root: Path | None = options.host_root
    if root is not None and not (root / "etc").is_dir():
        print(f"--host-root={root}: no root of a node is mounted there", file=sys.stderr)
        return 2
    seen = anyio.run(observe, settings, host_of(settings, root.absolute() if root else None))
    looks = []
    for each in look(settings, nvml_of(settings), seen):
        if options.output is None:
            print(each.line(), flush=True)
        looks.append(each)
    result = verdict(looks)
    document = {
        "verdict": result.text,
        "findings": [
            {"grade": each.grade.value, "subject": each.subject, "text": each.text} for each in looks
        ],
    }
    print(formatted(document, options, lambda _: result.text))
    if options.summary:
        worse = [each.line() for each in looks if each.grade is not Severity.OK]
        options.summary.write_text("\n".join([*worse, result.text]), encoding="utf-8")
    return result.code


def _nodes(options: argparse.Namespace) -> int:
    from agent.check.collecting import collect  # noqa: PLC0415  loads the API client

    say = partial(print, flush=True)
    where = (options.namespace, options.daemonset)
    return in_cluster(None, lambda api: collect(api, *where, options.timeout, say))
