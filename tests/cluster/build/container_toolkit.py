"""NVIDIA's programs in the agent's image, from the pinned Go module of the container toolkit."""

from pathlib import Path

from tests.cluster.build import cache, golang
from tests.cluster.build.cache import Report
from tests.cluster.build.families import GoFamily

CONTAINER_TOOLKIT = GoFamily(
    name="container-toolkit",
    version="1.20.1",
    # Beside the Dockerfile, which builds them, too.
    modules=Path(__file__).parents[3] / ".ci",
    module="container-toolkit",
    programs={
        f"github.com/NVIDIA/nvidia-container-toolkit/cmd/{name}": name
        for name in ("nvidia-ctk", "nvidia-cdi-hook")
    },
    # As the toolkit's own Makefile: functions of NVML are bound when they are called.
    ldflags="-extldflags=-Wl,-z,lazy",
    cgo=True,
)
"""What the agent's image brings along of NVIDIA's container toolkit."""


def container_toolkit(report: Report = lambda _line: None) -> Path:
    """A folder with nvidia-ctk and nvidia-cdi-hook, built on a miss. Raises BuildError."""

    def fill(into: Path) -> None:
        golang.compile_family(golang.find_go(report), CONTAINER_TOOLKIT, into, report)

    return cache.folder(CONTAINER_TOOLKIT.label, CONTAINER_TOOLKIT.key(), fill, report) / "bin"
