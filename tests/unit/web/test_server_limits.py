"""Limits of the HTTP server for its callers: bodies, heads, places, and time."""

import asyncio
import contextlib
import errno
import importlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anyio
import pytest

from agent.web import server as web
from agent.web.connections import Connection, ConnectionLimits
from agent.web.server import HttpRequest, HttpServer, Reply
from tests.pace import scaled
from tests.unit.web.test_server import hello, serving


async def told(request: HttpRequest) -> Reply:
    return Reply.text(f"{len(request.body)} bytes")


async def test_post_has_paths_of_its_own_and_a_limit() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_post("/told", told, 1000)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/told", data=b"x" * 1000) as reply:
            assert (reply.status, await reply.text()) == (200, "1000 bytes\n")
        async with client.post(f"{url}/told", data=b"x" * 1001) as reply:
            assert reply.status == 400
            assert await reply.text() == "the request is larger than 1000 bytes; nothing was done\n"
        async with client.get(f"{url}/told") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "POST")


async def test_a_body_of_unknown_length_is_bounded_too() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100

    server = HttpServer("127.0.0.1", 0)
    server.add_post("/told", told, 1000)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        with contextlib.suppress(aiohttp.ClientError):  # the answer may come while the client still sends
            async with client.post(f"{url}/told", data=endless()) as reply:
                assert reply.status == 400


async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = importlib.import_module("agent.web.server")
    patience = min(scaled(0.1), 1.0)  # a client of this process, too, has to be as fast
    monkeypatch.setattr(protocol, "HEAD_SECONDS", patience)
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    async with serving(server):
        whole, part = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /hello HTTP/1.1\r\nX: "
        for answered, begun in ((b"", b""), (b"", part), (whole, part)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            with anyio.fail_after(10), contextlib.suppress(ConnectionError):
                if answered:
                    writer.write(answered)
                    await reader.readuntil(b"None\n")
                writer.write(begun)
                assert await reader.read() == b""
            writer.close()
        with anyio.fail_after(10):
            while len(server.connections):
                await anyio.sleep(0.01)
        # One that waits between two requests is left alone for longer.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
            with anyio.fail_after(10):
                assert (await reader.readuntil(b"None\n")).startswith(b"HTTP/1.1 200")
            await anyio.sleep(3 * patience)
        writer.close()


async def test_probes_are_answered_while_every_place_for_requests_is_taken() -> None:
    free = anyio.Event()

    async def waits(_: HttpRequest) -> Reply:
        await free.wait()
        return Reply.text("at last")

    limits = ConnectionLimits(connections=20, connections_per_address=12, requests=6, requests_per_address=4)
    server = HttpServer("127.0.0.1", 0, limits=limits)
    server.add_route("/waits", waits)
    server.add_probe("/healthz", hello)

    async def ask(url: str, path: str) -> None:
        async with client.get(f"{url}{path}") as reply:
            found.append((path, reply.status))

    found: list[tuple[str, int]] = []
    async with serving(server) as url, aiohttp.ClientSession() as client, anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(ask, url, "/waits")
        with anyio.fail_after(10):
            while len(found) < 2:
                await anyio.sleep(0.01)
        assert found == [("/waits", 503)] * 2
        await ask(url, "/healthz")
        assert found.pop() == ("/healthz", 200)
        free.set()
    assert found == [("/waits", 503)] * 2 + [("/waits", 200)] * 4


async def test_who_does_not_read_the_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: HttpRequest) -> Reply:
        return Reply(b"x" * (32 << 20))

    monkeypatch.setattr(web, "ANSWER_SECONDS", 0.2)
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/large", large)
    async with serving(server):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        with anyio.fail_after(10):
            while not len(server.connections):
                await anyio.sleep(0.01)
            while len(server.connections):
                await anyio.sleep(0.01)
        writer.close()


async def test_large_bodies_have_room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_post("/told", told, 1000)
    monkeypatch.setattr(web, "HANDLER_SECONDS", min(scaled(0.5), 5.0))

    async def slowly(begun: anyio.Event) -> AsyncIterator[bytes]:
        yield b"x" * 900
        begun.set()
        await anyio.sleep_forever()

    async def hold(begun: anyio.Event) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            async with client.post(f"{url}/told", data=slowly(begun)) as reply:
                assert reply.status == 503

    async with (
        serving(server) as url,
        aiohttp.ClientSession() as client,
        anyio.create_task_group() as group,
    ):
        for _ in range(2):
            begun = anyio.Event()
            group.start_soon(hold, begun)
            await begun.wait()
        with anyio.fail_after(10):
            while server._body_bytes < 1800:
                await anyio.sleep(0.01)
        async with client.post(f"{url}/told", data=b"x" * 900) as reply:
            assert (reply.status, await reply.text()) == (503, "too many large requests at once; try again\n")
        with anyio.fail_after(10):
            while server._body_bytes:
                await anyio.sleep(0.01)
        async with client.post(f"{url}/told", data=b"x" * 900) as reply:
            assert reply.status == 200
        group.cancel_scope.cancel()


async def test_a_want_of_descriptors_makes_room_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    loop = asyncio.get_running_loop()
    accept, short = loop.sock_accept, [3]

    async def sock_accept(one: socket.socket) -> Any:
        if len(server.connections) == 2 and short[0]:
            short[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(one)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        async with client.get(f"{url}/hello") as reply:
            assert reply.status == 200
        assert server.connections.dropped >= 1
        for _, writer in idle:
            writer.close()


async def test_a_caller_that_is_dropped_in_the_middle_is_no_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def drops(_: HttpRequest) -> Reply:
        for one in dropped:
            one.drop()
        return Reply(b"x" * (1 << 20))

    dropped: list[Connection] = []
    server = HttpServer("127.0.0.1", 0)
    server.add_probe("/drops", drops)
    async with serving(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with anyio.fail_after(10):
            while not len(server.connections):
                await anyio.sleep(0.01)
            dropped.extend(server.connections._waiting)
            writer.write(b"GET /drops HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            while len(server.connections):
                await anyio.sleep(0.01)
        writer.close()
    assert not [each for each in caplog.records if each.name.startswith("aiohttp")]
