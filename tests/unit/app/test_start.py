"""Modules that an agent has before its sockets stand, in an interpreter that has imported nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_what_renders_pages_comes_in_with_the_first_of_them() -> None:
    script = "import sys, agent.cli.main, agent.app.run; print('prometheus_client' in sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
