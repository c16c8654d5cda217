"""A share that is only promised is called so."""

from collections.abc import Mapping

import pytest

from agent.model.modes import GpuMode, Mode
from agent.status.report import _enforced
from agent.status.table import _mode_notes


class Limits:
    """Limits of vGPU with one fence."""

    def __init__(self, fence: str, *, computes: bool = False) -> None:
        self._fence = fence
        self.computes = computes

    def fences(self) -> Mapping[str, bool]:
        return {self._fence: True}

    def document(self, *place: str) -> None:
        """No container has limits."""


@pytest.mark.parametrize(
    ("fence", "word"), [("library", "memory"), ("driver", "memory"), ("sweep", "no"), (None, "no")]
)
def test_vgpu_says_that_memory_alone_is_enforced(fence: str | None, word: str) -> None:
    assert _enforced(GpuMode(Mode.VGPU), None, Limits(fence) if fence else None) == word


def test_with_shares_of_compute_vgpu_is_enforced_where_the_library_is() -> None:
    mode = GpuMode(Mode.VGPU)
    assert _enforced(mode, None, Limits("library", computes=True)) == "yes"
    assert _enforced(mode, None, Limits("driver", computes=True)) == "memory"
    assert _enforced(mode, None, Limits("sweep", computes=True)) == "no"


def test_only_modes_of_amounts_say_whether_they_are_enforced() -> None:
    assert _enforced(GpuMode(Mode.MPS), {"capsAdvisory": None}, None) == "yes"
    assert _enforced(GpuMode(Mode.MPS), {"capsAdvisory": "containerd 1.7"}, None) == "no"
    assert _enforced(GpuMode(Mode.PGPU), None, None) is None
    assert _enforced(None, None, None) is None


def test_the_table_names_the_gpus() -> None:
    gpus = [
        {"index": n, "mode": {"reason": "", "enforced": word}} for n, word in enumerate(("no", "yes", "no"))
    ]
    assert _mode_notes(gpus) == [
        "GPU 0, 2: enforced: no: shares are promised, processes are not kept to them"
    ]


def test_the_table_says_what_is_not_enforced() -> None:
    gpus = [{"index": 3, "mode": {"reason": "", "enforced": "memory"}}]
    assert _mode_notes(gpus) == ["GPU 3: enforced: memory: compute is not enforced"]
