"""Running the tools of the build: bounded, quiet on success, with the last lines of output on failure."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.build.errors import BuildError


def run(
    what: str,
    argv: Sequence[str],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run `argv` to its end and return its standard output.

    `what` names the step in errors; `env` is added to the own environment; `timeout` is in seconds.
    """
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise BuildError(f"{what}: program {argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{what}: no result after {timeout:.0f} s: {' '.join(argv)}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"{what}: exit code {done.returncode} from {' '.join(argv)}\n{tail}")
    return done.stdout
