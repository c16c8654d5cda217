"""Google's own messages for the wire: compiled from `proto/` by protoc, served and called by C-core grpcio.

Two independent implementations at the two ends of a socket: what one gets wrong shows at the other.
"""

import functools
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpc_tools import protoc  # type: ignore[import-untyped]

SOURCES = Path(__file__).resolve().parents[2] / "proto"


@functools.cache
def load(name: str) -> Any:
    """Messages and services of `proto/<name>.proto` in one namespace."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["protoc", f"-I{SOURCES}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
        if protoc.main([*arguments, str(SOURCES / f"{name}.proto")]):
            raise RuntimeError(f"protoc failed on {name}.proto")
        sys.path.insert(0, folder)
        try:
            modules = [importlib.import_module(f"{name}_pb2"), importlib.import_module(f"{name}_pb2_grpc")]
        finally:
            sys.path.remove(folder)
    return SimpleNamespace(**{key: value for module in modules for key, value in vars(module).items()})
