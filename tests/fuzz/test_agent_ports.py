"""The whole agent, with a kubelet: what comes to its HTTP port and its control socket changes no list."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from agent.app import run as app
from agent.app.agent import Agent
from agent.cluster import reviews
from agent.cluster.api import ApiRefused, KubeApi
from agent.telemetry.access import MOST_ADMITTED, MOST_REFUSED, ScraperAdmission
from agent.web.control import NAME
from agent.web.server import HttpRequest, Reply
from tests.component.kubelet_room.parts import GPU
from tests.component.test_app import _get, _kubelet, _nvml, _settings
from tests.fuzz.campaign import Campaign

# A connection that is ended so leaves nothing behind: 100,000 of them would take all ports for a minute.
RESET = struct.pack("ii", 1, 0)
TURNS = 60


@pytest.fixture
def folder() -> Iterator[Path]:
    """Unix socket paths have at most 107 bytes, which pytest's folders may exceed."""
    made = Path(tempfile.mkdtemp(prefix="gna-"))
    yield made
    shutil.rmtree(made)


@asynccontextmanager
async def unchanged(folder: Path) -> AsyncIterator[Agent]:
    """A running agent whose lists are the same afterwards, and none of whose tasks failed."""
    kubelet = _kubelet(folder)
    lists: list[tuple[str, list[Any]]] = []
    async with kubelet.running(), app.running(_settings(folder), _nvml()) as agent:
        with anyio.fail_after(30):
            while kubelet.allocatable.get(GPU) != 8:
                await anyio.sleep(0.02)
        with kubelet.observing_lists(lambda resource, devices: lists.append((resource, [*devices]))):
            yield agent
            await anyio.sleep(0.1)
        assert lists == []
        assert kubelet.known_devices(GPU) == 8
        assert "ready" in await _get(agent, "/readyz")
        failed = {name: state.last_error for name, state in agent.core.supervisor.states.items()}
        assert {name: error for name, error in failed.items() if error} == {}


async def exchange(family: int, address: Any, data: bytes) -> bytes:
    """The beginning of the answer to `data` on a new connection; empty: nothing came."""
    with socket.socket(family) as one:
        one.setblocking(False)
        if family == socket.AF_INET:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        while (code := one.connect_ex(address)) == errno.EAGAIN:  # the listener, in this loop, is not as fast
            await anyio.sleep(0.001)
        assert code in (0, errno.EINPROGRESS), os.strerror(code)
        left = memoryview(data)
        # The server is in this loop, too: what is not answered within some turns of it waits for more bytes.
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while left:  # it may be answered before it is read to its end
                    left = left[one.send(left) :]
            try:
                return one.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                break
        return b""


REQUESTS = (
    b"GET /healthz HTTP/1.1\r\nHost: node\r\n\r\n",
    b"GET /readyz HTTP/1.1\r\nHost: node\r\nAccept: */*\r\nUser-Agent: kube-probe/1.36\r\n\r\n",
    b"HEAD /healthz HTTP/1.0\r\n\r\n",
    b"POST /healthz HTTP/1.1\r\nHost: node\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /readyz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b'GET /healthz?a=b&c=%00%ff#d HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nCookie: a=b; c="d\r\n\r\n',
    b"GET http://a:99999/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /readyz HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer eyJ.x.y\r\n\r\n",
)
HTTP_WORDS = (
    b"\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Connection: keep-alive, Upgrade\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"/metrics",
    b"//",
    b"%",
    b"HTTP/9.9",
)


async def test_web_port(campaign: Campaign, folder: Path) -> None:
    async with unchanged(folder) as agent:

        async def act(data: bytes) -> str:
            found = await exchange(socket.AF_INET, ("127.0.0.1", agent.core.http.port), data)
            assert found == b"" or found.startswith(b"HTTP/"), found[:100]
            assert b" 500 " not in found.partition(b"\r\n")[0], found[:200]
            return found[9:12].decode() or "silence"

        await campaign.run_async(act, REQUESTS, HTTP_WORDS)
        with anyio.fail_after(10):
            while len(agent.core.http.connections):
                await anyio.sleep(0.02)


COMMANDS = tuple(
    json.dumps(command).encode() + b"\n"
    for command in (
        {"command": "status"},
        {"command": "clear-health", "gpu": "0"},
        {"command": "clear-health", "gpu": "GPU-x", "removed": True},
        {"command": "release", "seconds": "600"},  # a number would be obeyed: that is what it is for
        {"command": "release", "seconds": None},
        {"command": "top"},
        {"command": ["release"]},
        {"seconds": 5},
    )
)


def _obeyed(data: bytes) -> bool:
    """Whether it is a proper command of root's to let NVML go, which lists follow."""
    try:
        request = json.loads(data.partition(b"\n")[0])
        return isinstance(request, dict) and request.get("command") == "release"
    except (ValueError, RecursionError):
        return False


async def test_control_socket(campaign: Campaign, folder: Path) -> None:
    async with unchanged(folder) as agent:
        path = str(Path(agent.core.settings.host.run) / NAME)

        async def act(data: bytes) -> str:
            if _obeyed(data):
                data = data.replace(b"release", b"releases")
            found = await exchange(socket.AF_UNIX, path, data)
            if not found:
                return "silence"
            # A long answer comes in parts, of which this is the first.
            line = json.loads(found) if found.endswith(b"\n") else {"ok": True}
            assert "its log says why" not in str(line.get("error")), line
            return "done" if line["ok"] else "refused"

        nested = b'{"command":' * 3000 + b"\n"  # ended the server once
        words = (b'"command":', b'"release"', b'"gpu":', b'"removed":true', b"\n")
        await campaign.run_async(act, (*COMMANDS, nested), words)


TOKENS = (
    b"Bearer good 1 1",
    b"Bearer eyJhbGciOi.x-_~+/==  0 1",
    b"Basic Z29vZA== 1 0",
    b"bearer  good 1 2",
    b"",
)


async def test_scrapers_tokens_and_the_answers_about_them(campaign: Campaign) -> None:
    """Nobody is admitted without the API server's word, whatever the header; nothing is kept without end."""
    admitted: set[str] = set()
    answer: list[object] = []

    async def post(path: str, body: Any, deadline: float = 0) -> bytes:
        if path == reviews.TOKENS:
            assert re.fullmatch(r"[!-~]+", body["spec"]["token"])
        reply = answer[path == reviews.ACCESS]
        if reply is None:
            raise ApiRefused(500, "no answer")
        return json.dumps({"status": reply}).encode()

    async def page(_: HttpRequest) -> Reply:
        return Reply.text("figures")

    api = cast("KubeApi", SimpleNamespace(post=post))
    now = 0.0
    admission = ScraperAdmission(reviews.Reviews(api, "/metrics", 1.0).review, lambda: now)
    guarded = admission.guarded(page)

    async def act(data: bytes) -> str:
        nonlocal now
        now += 1.0
        text, _, rest = data.decode("latin-1").rpartition(" ")
        header, _, first = text.rpartition(" ")
        user = {"username": "u", "groups": ["g"], "extra": {}}
        tokens = {"1": {"authenticated": True, "user": user}, "0": {"authenticated": False}}
        access = {"1": {"allowed": True}, "0": {"allowed": False}}
        answer[:] = [tokens.get(first, data.decode("latin-1")), access.get(rest)]
        reply = await guarded(HttpRequest("/metrics", headers={"Authorization": header}))
        assert reply.status in (200, 401, 403, 503)
        if reply.status == 200:
            token = header.split()[-1]
            assert (first, rest) == ("1", "1") or token in admitted
            admitted.add(token)
        assert len(admission._admitted) <= MOST_ADMITTED
        assert len(admission._refused) <= MOST_REFUSED
        return str(reply.status)

    await campaign.run_async(act, TOKENS, (b"Bearer ", b" 1 1", b" 0", b"good"), callers=1)
