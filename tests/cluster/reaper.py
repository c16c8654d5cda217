"""Undoes a cluster whose owner died without doing so: `python -m tests.cluster.reaper NAME`.

It waits for the end of its standard input, a pipe that the owner holds open; the kernel closes it however the
owner ends. After an orderly end there is nothing left to undo.
"""

import signal
import sys

from tests.cluster import host
from tests.cluster.processes import wait_gone

OWNER_SECONDS = 60.0


def main() -> int:
    name = sys.argv[1]
    # A terminal's Ctrl-C or a runner's SIGTERM to the whole group is for the owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    left = [record.owner for record in host.records() if record.name == name]
    # A dying process closes its files a little before it counts as dead.
    if left and wait_gone(left, OWNER_SECONDS):
        host.sweep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
