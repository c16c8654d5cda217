"""A launch that waits for its share is woken by the agent when limits change; both in real time."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent.vgpu import layout
from tests.component.caps.conftest import MakeContainer, Programs
from tests.component.caps.container import Container
from tests.pace import scaled

PATIENCE_SECONDS = 30


def hold(container: Container, share: int) -> int:
    """Hold it to a share in percent, as the agent does; how many threads that woke."""
    descriptor = os.open(container.limits, os.O_RDWR)
    try:
        now = layout.read_limits(os.pread(descriptor, layout.LIMITS_BYTES, 0))[0]
        return layout.write_limits(descriptor, 0, replace(now, compute=True, share=share * 100))
    finally:
        os.close(descriptor)


def test_a_change_of_limits_wakes_who_waits_by_a_read_only_mapping(
    container: MakeContainer, programs: Programs
) -> None:
    limited = container()
    assert hold(limited, 0) == 0  # nobody waits yet
    program = programs(limited, "init()", "kernel = function()")
    program.send("launch(kernel)")
    deadline = time.monotonic() + scaled(PATIENCE_SECONDS)
    # It looks by itself every 100 ms, and is not asleep for some microseconds then.
    while (woken := hold(limited, 0)) == 0:
        assert time.monotonic() < deadline, "nobody was woken"
        time.sleep(0.01)
    assert woken == 1
    mapped = [
        line
        for line in Path(f"/proc/{program.pid}/maps").read_text().splitlines()
        if str(limited.limits) in line
    ]
    assert [line.split()[1] for line in mapped] == ["r--s"]
    hold(limited, 50)
    program.receive()


def waited_ns(container: Container) -> int:
    return layout.read_usage(container.usage.read_bytes()[: layout.usage_head_bytes(1)])[0].waited_ns


def looked(container: Container, rounds: int) -> None:
    """Wait until who waits has looked so often."""
    deadline = time.monotonic() + scaled(PATIENCE_SECONDS)
    for _ in range(rounds):
        before = waited_ns(container)
        while waited_ns(container) == before:
            assert time.monotonic() < deadline, "nobody looks"
            time.sleep(0.01)


@pytest.mark.timeout(60)
def test_limits_that_were_seen_half_written_are_looked_at_again(
    container: MakeContainer, programs: Programs
) -> None:
    limited = container()
    hold(limited, 0)
    program = programs(limited, "init()", "kernel = function()")
    program.send("launch(kernel)")
    looked(limited, 1)
    before = limited.limits.read_bytes()
    hold(limited, 50)
    after = limited.limits.read_bytes()
    program.receive()
    # The same again, byte by byte: the generation is there already, the rest is not, and nobody is woken.
    limited = container()
    limited.limits.write_bytes(before)
    program = programs(limited, "init()", "kernel = function()")
    program.send("launch(kernel)")
    looked(limited, 1)
    start = next(at for at in range(layout.RECORDS_AT, len(before)) if before[at] != after[at])
    descriptor = os.open(limited.limits, os.O_RDWR)
    try:
        os.pwrite(descriptor, after[start : start + 8], start)
        looked(limited, 3)
        os.pwrite(descriptor, after[: layout.GATE_AT][start:], start)
    finally:
        os.close(descriptor)
    program.receive()
