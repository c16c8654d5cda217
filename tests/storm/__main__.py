"""`python -m tests.storm`: storms by seed, in a process of their own; see `make storm`.

Prints a line for each storm and, where one found something, its history with as few events as still show
it. The exit code is 1 then. `--report FILE` writes the figures as JSON.
"""

from time import perf_counter

from tests.storm import clock

clock.install()  # before any module of the agent takes its clock from `time`

import argparse  # noqa: E402
import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from functools import partial  # noqa: E402
from itertools import takewhile  # noqa: E402
from pathlib import Path  # noqa: E402

import structlog  # noqa: E402
from msgspec.structs import replace  # noqa: E402

from tests.storm import figures  # noqa: E402
from tests.storm.acts import families, later_families  # noqa: E402
from tests.storm.excuses import excused, excused_of  # noqa: E402
from tests.storm.jobs import Summary, side_by_side  # noqa: E402
from tests.storm.memory import ignore_what_is_there  # noqa: E402
from tests.storm.plan import SEEDS, Plan, planned, read  # noqa: E402
from tests.storm.shrinking import shrunk  # noqa: E402
from tests.storm.storm import Outcome, storm  # noqa: E402
from tests.storm.tempo import PAUSES  # noqa: E402
from tests.storm.world import Shape  # noqa: E402


def _rage(
    seed: int,
    steps: int,
    skip: frozenset[int] = frozenset(),
    wanted: frozenset[str] | None = None,
    tempo: str | None = None,
) -> Outcome:
    return _replay(planned(seed, steps, skip, wanted, tempo))


def _replay(plan: Plan) -> Outcome:
    outcome = Outcome(plan.seed)
    try:
        clock.run(partial(storm, outcome, plan))
    except clock.Stuck as stuck:
        outcome.violation = str(stuck)
    return outcome


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.storm")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="seeds apart (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--only", help="these seeds, with commas, in this order")
    parser.add_argument("--jobs", type=int, help="so many at once, each in a process of its own")
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="events of each that is dense; others have fewer (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no storm after so many")
    parser.add_argument("--skip", default="", help="numbers of events to leave out")
    parser.add_argument("--faults", help="families of faults, with commas, in place of the seed's choice")
    parser.add_argument("--tempo", choices=sorted(PAUSES), help="in place of the seed's choice")
    parser.add_argument("--no-shrink", action="store_true", help="show the history as it was")
    parser.add_argument("--until-found", action="store_true", help="begin no storm after one that found")
    parser.add_argument("--history", action="store_true", help="print every history")
    parser.add_argument("--kept", type=Path, nargs="*", help="files of storms to repeat; no others then")
    parser.add_argument("--log", action="store_true", help="print the agent's log")
    parser.add_argument("--report", type=Path, help="write the figures there")
    options = parser.parse_args()
    everything = Shape(mps=True, resize=True, extender=True, claims=True, mig=True)
    known = {each.name for each in (*families(everything), *later_families(everything))}
    if unknown := set((options.faults or "none").split(",")) - known - {"none"}:
        parser.error(
            f"--faults has no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}; none"
        )
    return options


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(each) for each in text.split(",") if each)


def _command(outcome: Outcome, options: argparse.Namespace) -> str:
    """The command that repeats it."""
    left_out = ",".join(map(str, sorted(outcome.skipped)))
    words = ["python", "-m", "tests.storm", "--seed", str(outcome.seed), "--steps", str(options.steps)]
    words += ["--faults", options.faults] if options.faults is not None else []
    words += ["--tempo", options.tempo] if options.tempo else []
    return shlex.join([*words, *(["--skip", left_out] if left_out else []), "--no-shrink"])


def _plans(
    options: argparse.Namespace, skip: frozenset[int], wanted: frozenset[str] | None
) -> Iterator[Plan]:
    if options.kept is not None:
        yield from map(read, options.kept or sorted(SEEDS.glob("*.json")))
        return
    seeds = range(options.seed, options.seed + options.seeds * options.every, options.every)
    for seed in map(int, options.only.split(",")) if options.only else seeds:
        yield planned(seed, options.steps, skip, wanted, options.tempo)


def main() -> int:
    """Run storms; the exit code."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a storm
        again = [sys.executable, "-m", "tests.storm", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    options = _arguments()
    level = logging.DEBUG if options.log else logging.CRITICAL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    if not options.log:
        logging.disable()
    # Most of what a storm makes lives until its end, and cycles are few.
    gc.set_threshold(200_000, 20, 100)
    ignore_what_is_there()
    skip = _numbers(options.skip)
    wanted = frozenset(options.faults.split(",")) if options.faults is not None else None

    def work(plan: Plan) -> Summary:
        return _lived(plan, options, wanted)

    begun = _until(options.seconds, _plans(options, skip, wanted))
    found = side_by_side(begun, options.jobs, work) if options.jobs else map(work, begun)
    summaries: list[Summary] = []
    for each in found:
        summaries.append(each)
        if each.violation and options.until_found:
            break
    if options.report:
        figures.write(options.report, **_figures(summaries))
    return 1 if any(each.violation for each in summaries) else 0


def _until(seconds: float, plans: Iterator[Plan]) -> Iterator[Plan]:
    """Plans, as long as there is time."""
    began = perf_counter()
    return takewhile(lambda _: perf_counter() - began <= seconds, plans)


def _lived(plan: Plan, options: argparse.Namespace, wanted: frozenset[str] | None) -> Summary:
    """Live through a storm, and say how it was."""
    started = perf_counter()
    outcome, seed = _replay(plan), plan.seed
    faults = ", ".join(outcome.families) or "none"
    print(
        f"seed {seed}: {plan.tempo}, {outcome.steps} steps, {outcome.faults} faults ({faults}), "
        f"{outcome.virtual_seconds:.0f} s in {perf_counter() - started:.1f}, "
        f"excused {outcome.excuses or 'nothing'}, history {outcome.digest}: "
        f"{outcome.violation or 'good'}",
        flush=True,
    )
    summary = Summary(
        seed,
        outcome.steps,
        outcome.virtual_seconds,
        outcome.faults,
        outcome.checks,
        outcome.violation,
        outcome.digest,
        outcome.families,
        *excused_of(outcome.excuses),
    )
    if outcome.violation and not options.no_shrink and options.kept is None:
        outcome.skipped = _numbers(options.skip)
        outcome = shrunk(outcome, options.steps, partial(_rage, wanted=wanted, tempo=options.tempo))
        print(f"again with: {_command(outcome, options)}")
        if outcome.plan:
            kept = replace(outcome.plan, showed=outcome.violation or "")
            print(f"to be kept in {SEEDS}, for --kept:\n{kept.text()}")
    if outcome.violation or options.history:
        print("\n".join(outcome.history))
    return summary


def _figures(summaries: list[Summary]) -> dict[str, figures.Figure]:
    with_faults = [each for each in summaries if each.families]
    offers = excused([each.offers for each in with_faults])
    admissions = excused([each.admissions for each in with_faults])
    refusals = excused([each.refusals for each in with_faults])
    return {
        "seeds": len(summaries),
        "steps": sum(each.steps for each in summaries),
        "virtual_hours": round(sum(each.virtual_seconds for each in summaries) / 3600, 2),
        "faults": sum(each.faults for each in summaries),
        "invariants": sum(each.checks for each in summaries),
        "excused_percent": max(offers, refusals),
        "excused_percent_of_offers": offers,
        "excused_percent_of_admissions": admissions,
        "excused_percent_of_refusals": refusals,
        "unwell_percent_of_admissions": excused([each.unwell for each in with_faults]),
        "failures": sum(each.violation is not None for each in summaries),
        "digests": {str(each.seed): each.digest for each in sorted(summaries, key=lambda each: each.seed)},
    }


if __name__ == "__main__":
    sys.exit(main())
