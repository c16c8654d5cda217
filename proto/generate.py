# ruff: noqa: INP001  a script, not a package
"""Generates the message classes from the `.proto` files beside this script into a clean folder.

`python proto/generate.py FOLDER`; `make proto` calls it for `agent/_proto`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
# betterproto2 must find its stand-ins before the first generated module imports it.
HEAD = "from agent.kit import lean_betterproto2  # noqa: F401\n"
PLUGIN_OPTIONS = ("server_generation=async", "client_generation=async")


def generate(folder: Path) -> None:
    """Replace everything in `folder`. Raises CalledProcessError when protoc refuses a source."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{SOURCES}",
        f"--python_betterproto2_out={folder}",
    ]
    command += [f"--python_betterproto2_opt={option}" for option in PLUGIN_OPTIONS]
    command += sorted(str(source) for source in SOURCES.glob("*.proto"))
    # protoc looks for the plugin, and the plugin for ruff, on the PATH.
    tools = str(Path(sys.executable).parent)
    subprocess.run(command, check=True, env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"})
    (folder / "__init__.py").write_text(HEAD, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python proto/generate.py FOLDER")
    generate(Path(sys.argv[1]))
