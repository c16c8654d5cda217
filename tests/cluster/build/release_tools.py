"""Programs that only the tests of releases need: an OCI registry, and the linter of GitHub's workflows."""

from pathlib import Path

from tests.cluster.build import cache, golang
from tests.cluster.build.cache import Report
from tests.cluster.build.families import GoFamily

REGISTRY = GoFamily(
    name="registry",
    version="3.1.2",
    module="registry",
    programs={"github.com/distribution/distribution/v3/cmd/registry": "registry"},
)
ACTIONLINT = GoFamily(
    name="actionlint",
    version="1.7.12",
    module="actionlint",
    programs={"github.com/rhysd/actionlint/cmd/actionlint": "actionlint"},
)


def program(family: GoFamily, report: Report = lambda _line: None) -> Path:
    """The one program of a family, built on a miss. Raises BuildError."""

    def fill(into: Path) -> None:
        golang.compile_family(golang.find_go(report), family, into, report)

    (name,) = family.programs.values()
    return cache.folder(family.label, family.key(), fill, report) / "bin" / name
