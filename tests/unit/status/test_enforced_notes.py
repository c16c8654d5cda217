"""A share that is only promised is called so."""

from agent.model.modes import GpuMode, Mode
from agent.status.report import _enforced
from agent.status.table import _mode_notes


def test_only_modes_of_amounts_say_whether_they_are_enforced() -> None:
    assert _enforced(GpuMode(Mode.VGPU)) == "no"
    assert _enforced(GpuMode(Mode.MPS), {"capsAdvisory": None}) == "yes"
    assert _enforced(GpuMode(Mode.MPS), {"capsAdvisory": "containerd 1.7"}) == "no"
    assert _enforced(GpuMode(Mode.PGPU)) is None
    assert _enforced(None) is None


def test_the_table_names_the_gpus() -> None:
    gpus = [
        {"index": n, "mode": {"reason": "", "enforced": word}} for n, word in enumerate(("no", "yes", "no"))
    ]
    assert _mode_notes(gpus) == [
        "GPU 0, 2: enforced: no: shares are promised, processes are not kept to them"
    ]
