"""A cluster by hand: `python -m tests.cluster up` holds one until Ctrl-C, `... sweep` removes leftovers."""

import signal
import sys
import time
from types import FrameType

from tests.cluster import host
from tests.cluster.build import BuildError, build_parts
from tests.cluster.rig import Cluster
from tests.cluster.waiting import RigError


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _up() -> None:
    # SIGINT, too: what a shell starts in the background inherits that it is ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    cluster = Cluster(build_parts(_say))
    with cluster:
        for stage, seconds in cluster.timings.items():
            _say(f"{seconds:6.2f} s  {stage}")
        _say(", ".join(f"{name} {size:.0f} MiB" for name, size in cluster.resident_mib().items()))
        _say(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.parts.kubernetes}/bin:$PATH")
        _say("Ctrl-C ends the cluster")
        try:
            signal.pause()
        except KeyboardInterrupt:
            started = time.monotonic()
    _say(f"{time.monotonic() - started:6.2f} s  gone")


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 with the reason on standard error; 2 for a wrong command line; 130 if interrupted."""
    try:
        match arguments:
            case ["up"]:
                _up()
            case ["sweep"]:
                _say(f"removed: {', '.join(host.sweep()) or 'nothing'}")
            case _:
                sys.stderr.write("usage: python -m tests.cluster up | sweep\n")
                return 2
    except KeyboardInterrupt:
        return 130  # what a shell reports for Ctrl-C
    except (BuildError, RigError) as error:
        sys.stderr.write(f"test cluster: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
