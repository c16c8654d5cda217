"""The enforcement library and the CUDA double, built once and cached; containers and their programs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clib.build_library import cached
from tests.component.caps.container import CHEAP_MIB, Container, make
from tests.cuda_double.fixtures import CACHE, Starter, driver, machine, release
from tests.cuda_double.machine import MIB, CudaGpu, CudaMachine
from tests.cuda_double.program import Program

__all__ = ["CACHE", "Programs", "container", "driver", "library", "machine", "release"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first on a machine fetches the compiler and builds library and driver."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def library() -> Path:
    """The enforcement library."""
    return cached()


class Programs(Starter):
    """Starts programs in a container; they end with the test."""

    def __call__(
        self, container: Container | None, *commands: str, driver: Path | None = None, **environment: str
    ) -> Program:
        """A program that has run the commands; outside of any container without one."""
        own = container.environment if container else {}
        return self.start(commands, driver, {**own, **environment})


@pytest.fixture(name="programs")
def started(machine: CudaMachine, driver: Path) -> Iterator[Programs]:
    """Starts programs on the machine."""
    made = Programs(machine, driver)
    with made.stack:
        yield made


MakeContainer = Callable[..., Container]


@pytest.fixture
def container(tmp_path: Path, library: Path) -> MakeContainer:
    """Makes containers; the cap is in MiB."""
    count = 0

    def one(*caps: int, context: int = 300, strict: bool = False) -> Container:
        nonlocal count
        count += 1
        return make(tmp_path / f"container-{count}", library, caps or (1024,), context=context, strict=strict)

    return one


@pytest.fixture
def gpu(tmp_path: Path) -> CudaMachine:
    """A GPU on which contexts are cheap."""
    return CudaMachine.create(tmp_path / "gpu", [CudaGpu(context_bytes=CHEAP_MIB * MIB)])
