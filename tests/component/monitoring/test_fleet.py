"""The board of a fleet, on a month of 500 nodes."""

import time
from pathlib import Path

import anyio.to_thread
import pytest

from tests.component.monitoring import fleet
from tests.component.monitoring.prometheus import served


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_fleet_dashboard_answers_for_500_nodes(tmp_path: Path) -> None:
    now = int(time.time()) - fleet.MINUTE
    written = await anyio.to_thread.run_sync(fleet.write, tmp_path, now)
    async with served(tmp_path, {}, "--storage.tsdb.retention.time=90d") as server:
        seconds, answers = await fleet.opened(server, "gpu-fleet", now)
    print(f"{written} samples of a month; the board opened in {seconds:.2f} s")
    assert len(answers) > 20
    for each in answers:
        assert each.lines, f"{each.panel} is empty"
        # A person reads them, and what is drawn over a month is read by the cluster, not by node.
        assert each.lines <= 30, f"{each.panel} draws {each.lines} lines"
        assert each.samples < 20_000, f"{each.panel} reads {each.samples} samples"
