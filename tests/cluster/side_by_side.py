"""Which tests run side by side where there are several workers (`pytest -n`), each with clusters of its own.

A file stays on one worker, since its tests share fixtures. Files that share more stay together: those of the
kubelet's default tick share a cluster, and those that install the chart the machine's own folders and MPS
daemons by the same name. The longest come first, so that none of them is left for the end.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

from xdist.scheduler import LoadScopeScheduling

TOGETHER: Final[Mapping[str, Sequence[str]]] = {
    "default tick": (
        "test_modes",
        "test_storm",
        "test_holders",
        "test_kubelet_alone",
        "test_lost_checkpoint",
    ),
    "installed": (
        "test_install",
        "test_release",
        "test_chart",
        "test_policies",
        "test_install_extender",
        "test_documented_commands",
        "test_pools",
        "test_gke",
    ),
}
LONGEST_FIRST: Final = (
    *TOGETHER["default tick"],
    *TOGETHER["installed"],
    *(
        "test_dra",
        "test_claims",
        "test_extender_pods",
        "test_vgpu",
        "test_health",
        "test_mps",
        "test_caps",
        "test_skeleton",
    ),
    *("test_extender", "test_extender_verbs", "test_shares", "test_kubectl_gpu", "test_upgrade"),
)
"""Files by the seconds that they take; those that are not named take few and come last."""


def place(nodeid: str) -> tuple[int, str]:
    """Sorts tests: by the file's place, then by its name."""
    file = _file(nodeid)
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST), file


def unit(nodeid: str) -> str:
    """Tests of the same unit run on the same worker."""
    file = _file(nodeid)
    return next((name for name, files in TOGETHER.items() if file in files), file)


def _file(nodeid: str) -> str:
    return PurePath(nodeid.partition("::")[0]).stem


class Schedule(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out units in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
