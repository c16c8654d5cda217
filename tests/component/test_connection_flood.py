"""Anybody who reaches a port may open connections without end: the probes are answered all the same.

Agent and extender run as processes of their own
with the soft limit of descriptors that containers often have.
"""

import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.cluster.agent_process import REPOSITORY
from tests.cluster.pki import Authority
from tests.cluster.rig import free_ports
from tests.component.agent_runs import run_in
from tests.pace import scaled

FLOOD = 1100
SOFT_LIMIT = 1024
# The kubelet gives a probe 5 s and tries six times; this machine may be busy with other tests, and a full
# queue of new connections costs a second for each time that the kernel tries again.
PROBE_SECONDS = 20.0
UNFINISHED = b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 4000
HELLO = b"\x16\x03\x01\x02\x00\x01"  # the beginning of a TLS handshake


@contextmanager
def soft_limit(limit: int | None) -> Iterator[None]:
    """Of descriptors, of this process and of those that it starts within; None: as high as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4 * SOFT_LIMIT, "the hard limit of descriptors is too low for this test"
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit or hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def agent(_folder: Path) -> AsyncIterator[tuple[int, list[tuple[int, bytes]]]]:
    """Port of its probes; ports to flood, and with what."""
    # Sockets of MPS daemons fit below a short folder only.
    async with anyio.TemporaryDirectory(prefix="gna-") as short, run_in(Path(short)) as one:
        with soft_limit(SOFT_LIMIT):
            await one.start()
        port = int((await one.logged("http_listening"))["port"])
        assert one.process.pid is not None
        yield port, [(port, UNFINISHED)]
        one.process.assert_not_crashed()
        await _limit_was_raised(one.process.pid)
        assert one.events("http_connections_dropped")


@asynccontextmanager
async def extender(folder: Path) -> AsyncIterator[tuple[int, list[tuple[int, bytes]]]]:
    """The same; it has no API server, and so only follows."""
    authority = Authority(folder / "pki")
    await anyio.to_thread.run_sync(authority.create)
    pki = authority.folder
    await anyio.to_thread.run_sync(lambda: authority.sign("extender", "/CN=extender", usage="serverAuth"))
    kubeconfig = authority.kubeconfig("extender", "https://127.0.0.1:1")
    plain, https = free_ports(2)
    flags = {
        "logging.format": "json",
        "http.address": "127.0.0.1",
        "http.port": plain,
        "tls.port": https,
        "tls.certificate": pki / "extender.crt",
        "tls.key": pki / "extender.key",
        "tls.clientAuthority": authority.certificate,
        "cluster.kubeconfig": kubeconfig,
        "lease.namespace": "default",
    }
    argv = [sys.executable, "-m", "agent", "extender"]
    argv += [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
    log = folder / "extender.log"

    def start() -> "subprocess.Popen[bytes]":
        with log.open("wb") as written, soft_limit(SOFT_LIMIT):
            return subprocess.Popen(argv, cwd=REPOSITORY, stdout=written, stderr=written)

    process = await anyio.to_thread.run_sync(start)
    try:
        yield plain, [(plain, UNFINISHED), (https, HELLO)]
        assert process.poll() is None, log.read_text()[-2000:]
        await _limit_was_raised(process.pid)
        assert "http_connections_dropped" in log.read_text()
    finally:
        process.kill()
        await anyio.to_thread.run_sync(process.wait)


async def _limit_was_raised(pid: int) -> None:
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard > SOFT_LIMIT


def probe(port: int, path: str = "/healthz") -> tuple[int, float]:
    """Status of a probe on a connection of its own, as the kubelet makes them, and how long it took."""
    began = time.monotonic()
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}{path}", timeout=scaled(PROBE_SECONDS)
        ) as answer:
            return answer.status, time.monotonic() - began
    except urllib.error.HTTPError as error:
        return error.code, time.monotonic() - began


def flood(port: int, begun: bytes, held: ExitStack, source: str = "127.0.0.1") -> None:
    """Open connections and leave them in the middle of something."""
    for _ in range(FLOOD):
        one = held.enter_context(
            socket.create_connection(("127.0.0.1", port), timeout=scaled(30), source_address=(source, 0))
        )
        with suppress(ConnectionError):  # it had to go already
            one.sendall(begun)


async def answering(port: int) -> None:
    with anyio.fail_after(30):
        while True:
            try:
                await anyio.to_thread.run_sync(probe, port)
            except OSError:
                await anyio.sleep(0.05)
            else:
                return


@pytest.mark.parametrize("serving", [agent, extender])
async def test_healthz_under_connection_flood(serving: Callable[..., object], tmp_path: Path) -> None:
    with soft_limit(None), ExitStack() as held:
        async with serving(tmp_path) as (port, targets):  # type: ignore[attr-defined]
            await answering(port)
            took = []

            async def healthy() -> None:
                status, seconds = await anyio.to_thread.run_sync(probe, port)
                took.append(seconds)
                assert status == 200

            for target, begun in targets:
                await anyio.to_thread.run_sync(flood, target, begun, held)
                for _ in range(5):
                    await healthy()
                # A client that waits for its answer on an earlier connection gets it, too.
                assert (await anyio.to_thread.run_sync(probe, port, "/metrics"))[0] == 200
            # While others come without a pause. Those of one's own address come in one's place, by chance.
            async with anyio.create_task_group() as group:
                group.start_soon(
                    anyio.to_thread.run_sync, flood, targets[0][0], targets[0][1], held, "127.0.0.2"
                )
                for _ in range(10):
                    await healthy()
            print(f"{len(took)} probes, the slowest {max(took):.3f} s")
            await anyio.to_thread.run_sync(held.close)
