"""NVIDIA's programs in the agent's image, from the pinned Go module of the container toolkit."""

from pathlib import Path

from tests.cluster.build import cache, golang
from tests.cluster.build.cache import Report
from tests.cluster.build.families import GoFamily


def toolkit_family(architecture: str = "") -> GoFamily:
    """The toolkit's programs in the agent's image, for a processor by Debian's name."""
    return GoFamily(
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
        architecture=architecture,
    )


def container_toolkit(report: Report = lambda _line: None, architecture: str = "") -> Path:
    """A folder with nvidia-ctk and nvidia-cdi-hook, built on a miss. Raises BuildError."""
    family = toolkit_family(architecture)

    def fill(into: Path) -> None:
        golang.compile_family(golang.find_go(report), family, into, report)

    return cache.folder(family.label, family.key(), fill, report) / "bin"
