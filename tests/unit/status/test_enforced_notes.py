"""A share that is only promised is called so."""

import pytest

from agent.app.vgpu_limits import NO_FENCES, word_of
from agent.status.table import _mode_notes


@pytest.mark.parametrize(
    ("fence", "word"), [("library", "memory"), ("driver", "memory"), ("sweep", "no"), (None, "no")]
)
def test_vgpu_says_that_memory_alone_is_enforced(fence: str | None, word: str) -> None:
    assert word_of(NO_FENCES | ({fence: True} if fence else {}), computes=False) == word


def test_with_shares_of_compute_vgpu_is_enforced_where_the_library_is() -> None:
    assert word_of(NO_FENCES | {"library": True}, computes=True) == "yes"
    assert word_of(NO_FENCES | {"driver": True}, computes=True) == "memory"
    assert word_of(NO_FENCES | {"sweep": True}, computes=True) == "no"


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
