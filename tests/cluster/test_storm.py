"""A small storm on the real cluster: a minute in every run; `STORM_MINUTES=10 STORM_SEED=7` by hand."""

import os
from collections.abc import AsyncIterator
from functools import partial

import anyio.to_thread
import pytest

from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios.storm import storm

SEED = int(os.environ.get("STORM_SEED", "1"))
SECONDS = 60.0 * float(os.environ.get("STORM_MINUTES", "1"))
LIMIT = SECONDS + 240
"""Seconds for the body of one test (see conftest.py)."""


@pytest.fixture
async def rig(patient: Cluster) -> AsyncIterator[RealRig]:
    """On the cluster whose kubelet has its default tick."""
    async with real_rig(patient) as made:
        yield made


async def test_a_storm_leaves_the_node_as_asked_for(rig: RealRig, patient: Cluster) -> None:
    async def restart(down: float) -> None:
        await anyio.to_thread.run_sync(partial(patient.restart_kubelet, down))

    assert await storm(rig, restart, SEED, SECONDS) >= SECONDS / 10
