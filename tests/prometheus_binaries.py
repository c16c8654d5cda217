"""The real Prometheus and its promtool for tests: Debian's package, unpacked into the user's cache.

`python -m tests.prometheus_binaries` fetches it and prints where it is.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tests.mps_binaries import unpack

PACKAGE, SUITE = "prometheus", "bookworm"


def programs() -> Path:
    """The folder of `prometheus` and `promtool`, fetched on the first call. Raises MpsBinaryMissing."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(base) / "gpu-node-agent" / "prometheus"
    root.mkdir(parents=True, exist_ok=True)
    final = root / SUITE
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may want it at once
        if not (final / "usr/bin/prometheus").exists():
            scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=root))
            try:
                unpacked = unpack(PACKAGE, SUITE, "main", scratch)
                shutil.rmtree(final, ignore_errors=True)
                unpacked.rename(final)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return final / "usr" / "bin"


if __name__ == "__main__":
    print(programs())
