"""`python -m tests.cluster.build`: build what the test cluster lacks, with progress lines."""

import sys
import time

from tests.cluster.build import BuildError, build_parts, missing_parts, release_tools


def main() -> int:
    """Return 0 when every part is there, 1 (with the reason on standard error) when one cannot be had."""
    started = time.monotonic()

    def report(line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - started:7.1f} s  {line}\n")
        sys.stdout.flush()

    try:
        if missing := missing_parts():
            report(f"to build first: {', '.join(missing)}")
        build_parts(report)
        for family in (release_tools.REGISTRY, release_tools.ACTIONLINT):
            release_tools.program(family, report)
    except BuildError as error:
        sys.stderr.write(f"test cluster: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
