"""Undoes a cluster whose owner died without doing so: `python -m tests.cluster.reaper NAME`.

It waits for the end of its standard input, a pipe that the owner holds open; the kernel closes it however the
owner ends. After an orderly end there is nothing left to undo.
"""

import signal
import sys

from tests.cluster import host


def main() -> int:
    name = sys.argv[1]
    # A terminal's Ctrl-C or a runner's SIGTERM to the whole group is for the owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    if any(record.name == name for record in host.records()):
        host.sweep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
