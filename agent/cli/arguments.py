"""Arguments that several commands have."""

import argparse
import os
import re
from pathlib import Path

from agent.status.table import parse_duration


def add_kubeconfig(parser: argparse.ArgumentParser) -> None:
    """Add --kubeconfig."""
    parser.add_argument("--kubeconfig", type=Path, help="(default: $KUBECONFIG, else the service account)")


def kubeconfig(options: argparse.Namespace) -> Path | None:
    """The file to use; None: the pod's service account."""
    known = os.environ.get("KUBECONFIG")
    given: Path | None = options.kubeconfig
    return given or (Path(known) if known else None)


def namespace(text: str) -> str:
    """A namespace's name, as a type of an argument: it becomes a part of paths."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a namespace")
    return text


def duration(text: str) -> float:
    """Seconds of 90s, 10m or 2h, as a type of an argument."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
