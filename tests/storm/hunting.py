"""`python -m tests.storm.hunting`: looks for every mutant, and adds to the figures of storms."""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.storm import figures
from tests.storm.mutants import BY_TESTS, HUNTS, MOST_STEPS, DoesNotApply, hunt, run_its_test


def _found(mutant: str, steps: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="gm-") as folder:
        try:
            found, said = (
                run_its_test(mutant, Path(folder))
                if mutant in BY_TESTS
                else hunt(mutant, Path(folder), steps)
            )
        except DoesNotApply as problem:
            found, said = False, str(problem)
    last = next((line for line in reversed(said.splitlines()) if line.startswith(("seed ", "FAILED "))), said)
    print(f"{mutant}: {'found' if found else 'NOT FOUND'}: {last[:300]}", flush=True)
    return found


def main() -> int:
    """Hunt; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm.hunting")
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="of each (default: %(default)s)")
    parser.add_argument("--only", help="these, with commas (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="at once (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="figures of storms, to be added to")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        wanted = options.only.split(",") if options.only else sorted(HUNTS | BY_TESTS)
        found = list(pool.map(lambda mutant: _found(mutant, options.steps), wanted))
    if options.report:
        figures.add(options.report, mutants=len(found), mutants_found=sum(found))
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
