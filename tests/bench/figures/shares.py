"""How well compute shares are kept: simulated, on the CUDA double's GPU, through the real library.

No figure of this file is a claim about hardware. Rows are the loads of the research; shares and their errors
are in the simulated GPU's own time, and do not depend on how fast this machine is.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import anyio.to_thread

from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement
from tests.component.shares.row import Load, Row, shares

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
}
"""What runs, with its share in percent -> how. Windows are 10 s where kernels are above 20 ms, and where the
demand comes and goes by itself."""
PAIR = Row((Load(10, "graph"), Load(90, "graph")), 33, 10)


def _run(row: Row) -> list[list[float]]:
    with tempfile.TemporaryDirectory(prefix="gnb-") as folder:
        return shares(row, Path(folder))


def _demand(load: Load) -> float:
    """What a container would use by itself; all loads but one want the whole GPU."""
    if load.load != "bursty":
        return 100
    return mean(_run(Row((Load(100, load.load, load.processes),), 33, 10))[0])


def _errors(row: Row, got: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """By container: mean error in points of the GPU, and what was lost of the goal in percent."""
    goals = [min(load.cap, _demand(load)) for load in row.loads]
    errors = [mean(abs(each - goal) for each in own) for goal, own in zip(goals, got, strict=True)]
    lost = [max(0.0, goal - mean(own)) / goal * 100 for goal, own in zip(goals, got, strict=True)]
    return errors, lost


def _all_rows() -> Mapping[str, Taken]:
    errors, lost, windows = [], [], 0
    for name, row in ROWS.items():
        got = _run(row)
        row_errors, row_lost = _errors(row, got)
        errors.append(mean(row_errors))
        lost.append(mean(row_lost))
        windows += sum(map(len, got))
        print(
            f"share row (simulated) {name}: error {errors[-1]:.1f} points, lost {lost[-1]:.1f} %", flush=True
        )
    small, large = (mean(own) for own in _run(PAIR))
    return {
        "share_error_mean_points": Taken(mean(errors), windows),
        "share_lost_percent": Taken(mean(lost), windows),
        "share_10_90_ratio": Taken(large / small, len(PAIR.loads)),
    }


@measurement(
    Figure("share_error_mean_points", "points", 3, "share of the simulated GPU against what was asked for"),
    Figure("share_lost_percent", "percent", 5, "of the share asked for, not had on the simulated GPU"),
    Figure("share_10_90_ratio", "ratio", 9.45, "graphs with 90 to graphs with 10 percent; 9 is exact"),
)
async def compute_shares(_conditions: Conditions) -> Mapping[str, Taken]:
    """All rows, one after the other."""
    return await anyio.to_thread.run_sync(_all_rows)
