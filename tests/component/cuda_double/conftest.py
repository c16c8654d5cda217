"""Programs that use the CUDA double."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cuda_double.fixtures import CACHE, Starter, driver, machine, release
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import Program

__all__ = ["CACHE", "Programs", "StartProgram", "driver", "machine", "release"]


class Programs(Starter):
    """Starts programs that end with the test."""

    def __call__(self, *commands: str, driver: Path | None = None, **environment: str) -> Program:
        """A program that has run the commands."""
        return self.start(commands, driver, environment)


@pytest.fixture(name="programs")
def started(machine: CudaMachine, driver: Path) -> Iterator[Programs]:
    """Starts programs on the machine."""
    made = Programs(machine, driver)
    with made.stack:
        yield made


StartProgram = Callable[..., Program]
