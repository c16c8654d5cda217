"""The GPU tier's tests of the enforcement library, run against the doubles of libcuda and NVML."""

import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.component.caps import tier
from tests.gpu import escapes, filling, test_assumptions, test_escapes, test_limits, test_memory
from tests.gpu.rig import Rig

Test = Callable[[Rig], Awaitable[None]]
PARAMETERS: dict[str, tuple[str, Iterable[str]]] = {
    "test_escape": ("way", escapes.WAYS),
    "test_no_false_out_of_memory": ("kind", filling.FILL),
}
PLAIN = {
    name: test
    for module in (test_assumptions, test_limits, test_escapes, test_memory)
    for name, test in vars(module).items()
    if name.startswith("test_") and callable(test)
}
TESTS: dict[str, Test] = {name: test for name, test in PLAIN.items() if name not in PARAMETERS}
for name, (parameter, values) in PARAMETERS.items():
    TESTS |= {f"{name}[{value}]": partial(PLAIN[name], **{parameter: value}) for value in values}


@pytest.fixture
def rig(driver: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig on a machine that both doubles play, in a folder that other users may look into."""
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        made = tier.doubles(folder, monkeypatch, library)
        monkeypatch.setattr(test_limits, "binding", made.binding)
        (folder / "rig").mkdir()
        yield tier.rig(folder / "rig", driver, made)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", TESTS)
async def test_on_the_double(name: str, rig: Rig) -> None:
    await TESTS[name](rig)


def test_the_tier_has_tests() -> None:
    assert len(PLAIN) == 16
