"""`python -m tests.cluster.build [peers]`: build what the tests of the cluster lack, with progress lines.

`peers`: for the tests with other projects' programs.
"""

import sys
import time

from tests.cluster.build import BuildError, agent_image, build_parts, cache, missing_parts, release_tools
from tests.cluster.build.container_toolkit import toolkit_family
from tests.cluster.build.peers import EARLIER_KUBERNETES, PEERS, built

PROGRAMS = (release_tools.REGISTRY, release_tools.ACTIONLINT)
"""Programs that only the tests of releases need."""
PROGRAM_MINUTES = 2


def missing(with_peers: bool) -> list[str]:
    """Parts to be built, each with the minutes that it takes on two cores that do nothing else."""
    found = missing_parts()
    if with_peers:
        found += [part for part in missing_parts(EARLIER_KUBERNETES) if part not in found]
        return found + [
            f"{each.family.label} (about {each.minutes} min, once)"
            for each in PEERS
            if not cache.is_built(each.family.label, each.key())
        ]
    found += [
        f"{family.label} (about {PROGRAM_MINUTES} min, once)"
        for family in (*PROGRAMS, toolkit_family())
        if not cache.is_built(family.label, family.key())
    ]
    if not agent_image.is_built():
        found.append("the agent's image (about 1 min, after each change of the agent)")
    return found


def main() -> int:
    """Return 0 when all is there, 1 (with the reason on standard error) when something cannot be had."""
    started, with_peers = time.monotonic(), "peers" in sys.argv[1:]

    def report(line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - started:7.1f} s  {line}\n")
        sys.stdout.flush()

    try:
        report(f"to build first: {', '.join(missing(with_peers)) or 'nothing'}")
        build_parts(report)
        if with_peers:
            build_parts(report, EARLIER_KUBERNETES)
            for each in PEERS:
                built(each, report)
            return 0
        for family in PROGRAMS:
            release_tools.program(family, report)
        agent_image.build(report)
    except BuildError as error:
        sys.stderr.write(f"test cluster: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
