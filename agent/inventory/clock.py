"""The clock of verdicts: seconds since boot, which an agent's restart does not set back."""

import time


def boot_seconds() -> float:
    """Seconds since the machine was booted, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
