"""How commands for people find the API server."""

import argparse
import os
from pathlib import Path


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add --kubeconfig."""
    parser.add_argument("--kubeconfig", type=Path, help="(default: $KUBECONFIG, else the service account)")


def chosen(options: argparse.Namespace) -> Path | None:
    """The file to use; None: the pod's service account."""
    known = os.environ.get("KUBECONFIG")
    given: Path | None = options.kubeconfig
    return given or (Path(known) if known else None)
