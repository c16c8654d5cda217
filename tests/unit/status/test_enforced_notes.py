"""A share that is only promised is called so."""

from agent.status.table import _mode_notes


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
