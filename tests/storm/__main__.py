"""`python -m tests.storm`: storms by seed; see `make storm`."""

import tests.storm.clock as clock  # noqa: I001  first: the agent's modules take their clocks from `time`

REAL = __import__("time").perf_counter
clock.install()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402

import structlog  # noqa: E402

from tests.storm.storm import storm  # noqa: E402


def main() -> int:
    """Run storms; 1 where one found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--skip", default="", help="numbers of events to leave out")
    parser.add_argument("--log", action="store_true", help="show the agent's log")
    parser.add_argument("--history", action="store_true")
    options = parser.parse_args()
    level = logging.DEBUG if options.log else logging.CRITICAL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    skip = frozenset(int(each) for each in options.skip.split(",") if each)
    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        began = REAL()
        outcome = clock.run(partial(storm, seed, options.steps, skip))
        took = REAL() - began
        print(
            json.dumps(
                {
                    "seed": seed,
                    "families": outcome.families,
                    "virtual_hours": round(outcome.virtual_seconds / 3600, 2),
                    "seconds": round(took, 2),
                    "digest": outcome.digest,
                    "violation": outcome.violation,
                }
            ),
            flush=True,
        )
        if options.history or outcome.violation:
            print("\n".join(outcome.history[-30:] if not options.history else outcome.history))
        failed += outcome.violation is not None
    return 1 if failed else 0


sys.exit(main())
