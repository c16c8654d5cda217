"""How well compute shares are kept: simulated, on the CUDA double's GPU, through the real library.

No figure of this file is a claim about hardware. Rows are the loads of the research, by which the controller
was tuned, and others by which it was not, each with figures of their own; shares and their errors are in the
simulated GPU's own time, and do not depend on how fast this machine is.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import anyio.to_thread

from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement
from tests.component.shares.row import Load, Result, Row, result

ROWS: Mapping[str, Row] = {
    "tiny kernels, 30": Row((Load(30, "tiny"),), 9),
    "training mix, 50": Row((Load(50, "train"),), 13),
    "kernels of 50 to 200 ms, 30": Row((Load(30, "long"),), 33, 10),
    "the same, 10": Row((Load(10, "long"),), 33, 10),
    "graphs of 20 ms, 40": Row((Load(40, "graph"),), 23),
    "launch and wait, 25": Row((Load(25, "sync"),), 15),
    "requests in bursts, 30": Row((Load(30, "bursty"),), 33, 10),
    "training, 8 processes, 40": Row((Load(40, "train", 8),), 13),
    "training, 30 next to 70": Row((Load(30, "train"), Load(70, "train")), 15),
    "graphs, 4 times 25": Row((Load(25, "graph"),) * 4, 23),
    "long 10, waiting 40, graphs 50": Row((Load(10, "long"), Load(40, "sync"), Load(50, "graph")), 33, 10),
    "training in two streams, 40": Row((Load(40, "train", 1, 2),), 13),
    "8 streams beside each other, 40": Row((Load(40, "even", 1, 8),), 13),
    "the same, 30 next to 70": Row((Load(30, "even", 1, 8), Load(70, "train")), 13),
    "8 streams, then one, in turn, 40 next to 60": Row(
        (Load(40, "turning", 1, 8), Load(60, "train")), 33, 10
    ),
    "1 us and 5 ms in turn, 20": Row((Load(20, "mixed"),), 13),
    "the same, 20 next to 80": Row((Load(20, "mixed"), Load(80, "train")), 13),
    "the same, 2 processes, 40": Row((Load(40, "mixed", 2),), 13),
    "2 us, 0.2 ms and 6 ms at random, 30 alone": Row((Load(30, "varied"),), 13),
    "three lengths at random, 30 next to 70": Row((Load(30, "varied"), Load(70, "train")), 13),
    "a second of 20 us, a second of 4 ms, 20 next to 80": Row(
        (Load(20, "changing"), Load(80, "train")), 33, 10
    ),
}
"""Loads with their shares in percent -> how they run. Windows are 10 s where kernels are above 20 ms, and
where the demand comes and goes by itself."""
HELD_OUT: Mapping[str, Row] = {
    "kernels of 35 us, 55": Row((Load(55, "brief"),), 9),
    "inference mix, 20": Row((Load(20, "infer"),), 13),
    "kernels of 5 to 15 ms, 35": Row((Load(35, "medium"),), 23),
    "the same, waiting for each, 15": Row((Load(15, "waiting"),), 23),
    "graphs of 6 ms, 65": Row((Load(65, "decode"),), 13),
    "graphs of 40 ms, twice 50": Row((Load(50, "prefill"),) * 2, 33, 10),
    "kernels and copies on the GPU, 30": Row((Load(30, "copying"),), 13),
    "the same, 30 next to 70": Row((Load(30, "copying"), Load(70, "train")), 13),
    "jobs in bursts, 20": Row((Load(20, "jobs"),), 33, 10),
    "inference mix, 3 processes, 60": Row((Load(60, "infer", 3),), 13),
    "graphs of 6 ms, 15 next to 85": Row((Load(15, "decode"), Load(85, "decode")), 23),
    "long kernels beside short ones in 4 streams, 45": Row((Load(45, "beside", 1, 4),), 13),
    "0.2 ms where every eighth launch would be measured, else 2 ms, 20": Row((Load(20, "hiding"),), 13),
    "1 us and 1.5 ms in turn, 20 next to 80": Row((Load(20, "within"), Load(80, "train")), 13),
    "kernels of 10 us to 4 ms, 25, 25 and graphs 50": Row(
        (Load(25, "wide"),) * 2 + (Load(50, "decode"),), 13
    ),
    "inference 20, graphs 30, short kernels 50": Row(
        (Load(20, "infer"), Load(30, "decode"), Load(50, "brief")), 13
    ),
}
"""Rows by which nothing was tuned: other lengths, mixes, graphs and shares."""
PAIR = Row((Load(10, "graph"), Load(90, "graph")), 33, 10)


STREAMS = 8
BURSTS = ("bursty", "jobs")


def _run(row: Row) -> Result:
    with tempfile.TemporaryDirectory(prefix="gnb-") as folder:
        return result(row, Path(folder))


def _demand(load: Load) -> float:
    """The share that a container would use by itself; but for bursts all loads want the whole GPU."""
    if load.load not in BURSTS:
        return 100
    return mean(_run(Row((Load(100, load.load, load.processes),), 33, 10)).shares[0])


def _errors(row: Row, got: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """By container: mean error in points of the GPU, and what was lost of the goal in percent."""
    goals = [min(load.cap, _demand(load)) for load in row.loads]
    errors = [mean(abs(each - goal) for each in own) for goal, own in zip(goals, got, strict=True)]
    lost = [max(0.0, goal - mean(own)) / goal * 100 for goal, own in zip(goals, got, strict=True)]
    return errors, lost


def _all(rows: Mapping[str, Row], kind: str) -> tuple[Taken, Taken]:
    """Mean error and mean loss."""
    errors, lost, windows = [], [], 0
    for name, row in rows.items():
        got = _run(row).shares
        row_errors, row_lost = _errors(row, got)
        errors.append(mean(row_errors))
        lost.append(mean(row_lost))
        windows += sum(map(len, got))
        print(
            f"share row (simulated, {kind}) {name}: error {errors[-1]:.1f} points, lost {lost[-1]:.1f} %",
            flush=True,
        )
    return Taken(mean(errors), windows), Taken(mean(lost), windows)


def _all_rows() -> Mapping[str, Taken]:
    error, lost = _all(ROWS, "tuned")
    other_error, other_lost = _all(HELD_OUT, "held out")
    # Eight graphs of which each is launched every two seconds are learned in the first ten.
    small, large = (mean(own[1:]) for own in _run(PAIR).shares)
    return {
        "share_error_mean_points": error,
        "share_lost_percent": lost,
        "share_held_out_error_mean_points": other_error,
        "share_held_out_lost_percent": other_lost,
        "share_10_90_ratio": Taken(large / small, len(PAIR.loads)),
    }


@measurement(
    Figure("share_error_mean_points", "points", 3, "share of the simulated GPU against what was asked for"),
    Figure("share_lost_percent", "percent", 5, "of the share asked for, not had on the simulated GPU"),
    Figure(
        "share_held_out_error_mean_points", "points", 3, "the same error, of rows that nothing was tuned by"
    ),
    Figure("share_held_out_lost_percent", "percent", 5, "the same loss, of rows that nothing was tuned by"),
    Figure("share_10_90_ratio", "ratio", 9.45, "graphs with 90 to graphs with 10 percent; 9 is exact"),
)
async def compute_shares(_conditions: Conditions) -> Mapping[str, Taken]:
    """All rows, one after the other."""
    return await anyio.to_thread.run_sync(_all_rows)
