"""The GPU tier's tests of the enforcement library, run against the doubles of libcuda and NVML."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.component.caps import tier
from tests.gpu import test_limits
from tests.gpu.rig import Rig

TESTS = {
    name: test for name, test in vars(test_limits).items() if name.startswith("test_") and callable(test)
}


@pytest.fixture
def rig(tmp_path: Path, driver: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig on a machine that both doubles play."""
    made = tier.doubles(tmp_path, monkeypatch, library)
    monkeypatch.setattr(test_limits, "binding", made.binding)
    folder = tmp_path / "rig"
    folder.mkdir()
    return tier.rig(folder, driver, made)


@pytest.mark.parametrize("name", TESTS)
async def test_on_the_double(name: str, rig: Rig) -> None:
    test: Callable[[Rig], Awaitable[None]] = TESTS[name]
    await test(rig)


def test_the_tier_has_tests() -> None:
    assert len(TESTS) == 6
