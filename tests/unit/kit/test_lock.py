"""The lock between processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.kit.files import Taken, exclusive

HOLDER = """
import sys, pathlib
from agent.kit.files import exclusive
with exclusive(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_first_ones_number(tmp_path: Path) -> None:
    path = tmp_path / "made" / "agent.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Taken, match=rf"agent\.lock is held by process {holder.pid}"), exclusive(path):
            raise AssertionError
        holder.kill()  # however it dies, the kernel drops the lock
        holder.wait(10)
        with exclusive(path):
            assert path.exists()
    assert path.exists()


def test_the_lock_is_free_after_its_context_even_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    with pytest.raises(ValueError, match="inside"), exclusive(path):
        raise ValueError("inside")
    with exclusive(path), pytest.raises(Taken), exclusive(path):
        raise AssertionError
