"""A usage region that cannot be read is logged when that begins, not once a second."""

from pathlib import Path

import anyio.to_thread
from structlog.testing import capture_logs

from agent.vgpu.folders import USAGE
from agent.vgpu.isolation_errors import QUIET_SECONDS, Problems
from tests.unit.vgpu.test_watch import Node


def test_a_problem_is_logged_when_it_begins() -> None:
    clock = [0.0]
    problems = Problems(clock=lambda: clock[-1])
    with capture_logs() as lines:
        for _ in range(3):
            problems.met("a", "no space")
        problems.met("b", "no space")
        for seconds in (1.0, QUIET_SECONDS - 1, QUIET_SECONDS):  # it begins and ends as its container likes
            clock.append(seconds)
            problems.over("a")
            problems.met("a", "no space")
        problems.keep(["a"])  # the folder of b is gone, and made again
        problems.met("a", "no space")
        problems.met("b", "no space")
    assert [line["folder"] for line in lines] == ["a", "b", "a", "b"]
    assert {(line["event"], line["problem"]) for line in lines} == {("usage_unreadable", "no space")}


async def test_a_region_that_its_container_spoils_is_logged_once(tmp_path: Path) -> None:
    node = await anyio.to_thread.run_sync(Node, tmp_path)
    key = await node.admit()
    region = node.isolation.folders.path(key, USAGE)

    def spoil() -> None:
        region.unlink()
        region.mkdir()

    await anyio.to_thread.run_sync(spoil)
    node = await anyio.to_thread.run_sync(Node, tmp_path)  # an agent that has it open loses nothing by it
    with capture_logs() as lines:
        await node.isolation.start()
        for _ in range(5):
            await node.look(0, 7)
            await anyio.to_thread.run_sync(node.isolation._keep_up, node.isolation.containers.value)
    seen = [line for line in lines if line["event"] == "usage_unreadable"]
    assert len(seen) == 2  # one of each reader
