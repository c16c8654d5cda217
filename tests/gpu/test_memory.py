"""Before a real driver the library refuses no allocation below the cap, and lets none above it through."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.cuda_double.program import program
from tests.gpu import built
from tests.gpu.filling import FILL, HELPERS, PIECES
from tests.gpu.limits import MIB, Capped
from tests.gpu.rig import Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CAP = 2048  # MiB
ROOM = 1024
SLACK = 64
# Contexts of all of them at once fit into half of the cap.
PROCESSES, KILLS, STORM_CAP = 12, 40, 8192


def environment(rig: Rig, container: Capped) -> dict[str, str]:
    return {**os.environ, **container.environment, "CUDA_VISIBLE_DEVICES": rig.gpu.uuid}


def filled_and_emptied(rig: Rig, container: Capped, kind: str) -> None:
    """Twice, to 64 MiB below the cap. Blocks."""
    count = PIECES.get(kind, ROOM // 8)
    take, give = FILL[kind]
    with program(Path(rig.library_path()), environment(rig, container)) as app:
        app(HELPERS, "init()")
        base = container.usage.total_bytes
        cap = math.ceil(base / MIB) + ROOM + SLACK
        container.resize(cap)
        for _ in range(2):
            app(f"held = [{take} for _ in range({count})]")
            assert base + ROOM * MIB <= container.usage.total_bytes <= cap * MIB
            app(f"[{give} for one in held]", "tidy()")
            assert container.usage.total_bytes <= base + SLACK * MIB
    assert container.usage.peak_bytes <= cap * MIB


@pytest.mark.parametrize("kind", FILL)
async def test_no_false_out_of_memory(rig: Rig, kind: str) -> None:
    container = await rig.container(CAP)
    await anyio.to_thread.run_sync(filled_and_emptied, rig, container, kind)


def stormed(rig: Rig, container: Capped) -> dict[str, Any]:
    """The fate of processes that allocate by every class while some are killed and stopped. Blocks."""
    done = subprocess.run(
        [str(built.program(built.STORM)), rig.library_path(), str(PROCESSES), str(KILLS), "7"],
        env=environment(rig, container),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


async def alone(rig: Rig, container: Capped) -> int:
    """The charge of a container for one process that has a context and nothing else, in bytes."""
    async with rig.client("memory", limits=container) as client:
        await client.ready()
        await client.result()
        return await anyio.to_thread.run_sync(lambda: container.usage.total_bytes)


async def test_memory_storm_never_over(rig: Rig) -> None:
    context = await alone(rig, await rig.container(STORM_CAP, "fresh"))
    container = await rig.container(STORM_CAP)
    happened = await anyio.to_thread.run_sync(stormed, rig, container)
    usage = await anyio.to_thread.run_sync(lambda: container.usage)
    print(happened, f"peak {usage.peak_bytes / MIB} of {STORM_CAP} MiB")
    assert happened["errors"] == 0, happened["first_error"]
    assert happened["kills"] == KILLS
    assert all(granted > 0 for granted, _ in happened["classes"].values())
    assert usage.peak_bytes <= STORM_CAP * MIB
    # All are dead, and so all of it is the next one's.
    assert abs(await alone(rig, container) - context) <= SLACK * MIB
