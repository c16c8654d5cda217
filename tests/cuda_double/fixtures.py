"""Fixtures for tests on the CUDA double: its library, GPUs in a file, programs that use them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cuda_double.build import RELEASES, build
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import Program, program

CACHE = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="session")
def driver() -> Path:
    """libcuda.so.1 of the newest release."""
    return build(CACHE)


@pytest.fixture(scope="session", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Each release of cuda.h."""
    return str(request.param)


@pytest.fixture
def machine(tmp_path: Path) -> CudaMachine:
    """One GPU of 16 GiB."""
    return CudaMachine.create(tmp_path / "cuda-state")


@dataclass
class Starter:
    """Starts programs that end when `stack` does."""

    machine: CudaMachine
    driver: Path
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self, commands: Sequence[str], driver: Path | None, environment: Mapping[str, str]) -> Program:
        """A program that has run the commands."""
        variables = {**self.machine.environment, **environment}
        started = self.stack.enter_context(program(driver or self.driver, variables))
        started(*commands)
        return started
