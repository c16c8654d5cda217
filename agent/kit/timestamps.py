"""Clocks: times as Kubernetes writes them, and one that an agent's restart does not set back."""

import datetime as dt
import time


def now() -> str:
    """The present time in RFC 3339, to the second, in UTC."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def boot_seconds() -> float:
    """Seconds since the machine was booted, time asleep included: the clock of verdicts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
