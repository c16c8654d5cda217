"""`python -m tests.bench [--list] [--cluster] [--only NAME ...] [--output FILE]`.

Figures on the test cluster are a group of their own, since its programs take minutes to build.

Exit code 0 when every figure was taken (a budget that does not hold is reported and no failure), 1 when one
could not be taken, 2 for a wrong command line.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import structlog

from agent.kit.tasks import describe
from tests.bench import report
from tests.bench.calibration import calibrator
from tests.bench.conditions import ROOT, Conditions, load_average, to_build
from tests.bench.registry import Measurement, discover


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    measurements = discover()
    known = {figure.name: one for one in measurements for figure in one.figures}
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Figures beside their budgets."
    )
    parser.add_argument("--list", action="store_true", help="list the figures and take none")
    parser.add_argument("--cluster", action="store_true", help="take the figures on the test cluster instead")
    parser.add_argument("--only", action="append", metavar="NAME", choices=sorted(known), default=[])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    options = parser.parse_args(arguments)
    if options.list:
        for one in measurements:
            for figure in one.figures:
                print(f"{figure.name}: {figure.what}")
        return 0
    # The embedded kubelet runs in this process and logs every move.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    group = [one for one in measurements if one.cluster is options.cluster]
    chosen = [known[name] for name in dict.fromkeys(options.only)] or group
    for line in to_build(cluster=any(one.cluster for one in chosen)):
        print(line, file=sys.stderr, flush=True)
    try:
        rows = anyio.run(_run, list(dict.fromkeys(chosen)))
    except Exception as error:  # noqa: BLE001  the conditions cannot be made: no figure can be taken
        print(f"the bench cannot start: {describe(error)}", file=sys.stderr)
        return 1
    report.write(rows, options.output)
    print(report.table(rows))
    print(f"written to {options.output}; load average {load_average():.1f}")
    return 1 if any(row.taken is None for row in rows) else 0


async def _run(measurements: Sequence[Measurement]) -> list[report.Row]:
    conditions = Conditions.prepare()
    await conditions.warm_up()
    with calibrator() as calibrated:
        return await report.run(measurements, conditions, calibrated)


if __name__ == "__main__":
    sys.exit(main())
