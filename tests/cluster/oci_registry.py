"""An OCI registry on the loopback of a cluster's network, as a place to publish releases to."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.cluster.rig import Cluster, free_ports
from tests.cluster.waiting import RigError

START_SECONDS = 30.0


@contextmanager
def registry(cluster: Cluster, program: Path) -> Iterator[str]:
    """`localhost:<port>`, which container runtimes and helm take for one without TLS."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="registry-", dir=cluster.layout.root) as folder:
        configuration = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": f"{folder}/data"}},
            "http": {"addr": f"127.0.0.1:{port}"},
        }
        path, log = Path(folder) / "config.yaml", Path(folder) / "log"
        path.write_text(yaml.safe_dump(configuration))
        with log.open("wb") as output:
            argv = cluster.reaching_api([str(program), "serve", str(path)])
            process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait(cluster, port, process, log)
            yield f"localhost:{port}"
        finally:
            process.terminate()
            process.wait(10)


def _wait(cluster: Cluster, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    look = cluster.reaching_api(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"])
    while subprocess.run(look, capture_output=True, timeout=10, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RigError(f"the registry does not answer; end of its log:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
