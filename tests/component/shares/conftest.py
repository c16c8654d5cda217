"""Containers with compute shares on a simulated GPU of virtual time, the real library between them and it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from clib.build_library import cached
from tests.component.caps.container import Container, hold, make
from tests.component.shares.row import CLOCK
from tests.cuda_double.fixtures import driver
from tests.cuda_double.layout_time import ClockMode
from tests.cuda_double.machine import CudaMachine
from tests.cuda_double.program import Program, program
from tests.cuda_double.timed import HELP

__all__ = ["driver", "hold"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first on a machine fetches the compiler and builds library and driver."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


class Site:
    """A machine and containers on it."""

    def __init__(self, stack: ExitStack, folder: Path, driver: Path) -> None:
        self._stack, self._folder, self._driver = stack, folder, driver
        self._count = 0
        self.tasks(1)

    def tasks(self, count: int) -> None:
        """How many programs take part in the GPU's time; before the first one is started."""
        self.machine = CudaMachine.create(self._folder / "state", clock=ClockMode.VIRTUAL, tasks=count)

    def container(self, share: int | None) -> Container:
        """A container with a share in percent."""
        self._count += 1
        made = make(self._folder / f"container-{self._count}", cached(clock=CLOCK), (8192,), context=0)
        hold(made, share)
        return made

    def program(self, container: Container) -> Program:
        """A program in a container."""
        environment = {**self.machine.environment, **container.environment}
        started = self._stack.enter_context(program(self._driver, environment))
        started(HELP)
        return started


@pytest.fixture
def site(tmp_path: Path, driver: Path) -> Iterator[Site]:
    """One GPU with a virtual clock."""
    with ExitStack() as stack:
        yield Site(stack, tmp_path, driver)
