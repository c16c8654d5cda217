"""The fleet's dashboard on a month of 500 nodes."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from tests.bench.conditions import Conditions
from tests.bench.registry import Figure, Taken, measurement, percentile
from tests.component.monitoring import fleet
from tests.component.monitoring.prometheus import served

OPENINGS = 5


@measurement(
    Figure(
        "fleet_dashboard_s",
        "s",
        2,
        "all queries of gpu-fleet over 30 days of 500 nodes, six at a time; the median",
    )
)
async def fleet_dashboard(_: Conditions) -> Mapping[str, Taken]:
    now = int(time.time()) - fleet.MINUTE
    with tempfile.TemporaryDirectory(prefix="gna-fleet-") as folder:
        await anyio.to_thread.run_sync(fleet.write, Path(folder), now)
        async with served(Path(folder), {}, "--storage.tsdb.retention.time=90d") as server:
            values = [(await fleet.opened(server, "gpu-fleet", now))[0] for _ in range(OPENINGS)]
    return {"fleet_dashboard_s": Taken(percentile(values, 0.5), len(values))}
