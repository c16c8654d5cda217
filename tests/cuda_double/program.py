"""A CUDA program in a process of its own, commanded by a test."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any, Final

_CLIENT: Final = Path(__file__).with_name("client.py")


class ProgramError(Exception):
    """The program raised; the text is its exception."""


class Program:
    """Runs statements and expressions of `tests/cuda_double/client.py`, one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def __call__(self, *commands: str) -> Any:
        """The value of the last command. Raises ProgramError; blocks while a call hangs."""
        value = None
        for command in commands:
            self.send(command)
            value = self.receive()
        return value

    def send(self, command: str) -> None:
        """Start a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the command that was started, and return its value. Raises ProgramError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(f"the program ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ProgramError(answer["error"])
        return answer["value"]

    def signal(self, number: Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self, number: Signals = Signals.SIGKILL) -> None:
        """End it by a signal and wait."""
        self.signal(number)
        self._process.wait()


@contextmanager
def program(library: Path, environment: Mapping[str, str]) -> Iterator[Program]:
    """A program with `library` loaded. It is ended and waited for, whatever the test does."""
    with commanded([sys.executable, "-I", "-S", str(_CLIENT), str(library)], environment) as started:
        yield started


@contextmanager
def commanded(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, leave_seconds: float = 0
) -> Iterator[Program]:
    """A command that passes a program's input and output on, ended like a program of this machine.

    With `leave_seconds` the program is first given so long to end because nobody commands it any more.
    """
    process = subprocess.Popen(
        argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield Program(process)
        finally:
            try:
                if leave_seconds:
                    assert process.stdin is not None
                    process.stdin.close()
                    process.wait(leave_seconds)
            finally:
                process.kill()
