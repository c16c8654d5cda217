"""The HTTP server over real loopback sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from agent.web import server as web
from agent.web.connections import CannotListen
from agent.web.server import HttpRequest, HttpServer, Reply

Logs = list[MutableMapping[str, Any]]


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[str]:
    """The server's address as a URL while it serves."""
    async with anyio.create_task_group() as group:
        port = await group.start(server.serve)
        yield f"http://127.0.0.1:{port}"
        group.cancel_scope.cancel()


async def hello(request: HttpRequest) -> Reply:
    return Reply.text(f"hello {request.query.get('who', 'nobody')} {request.headers.get('x-colour')}")


async def test_a_route_is_answered_with_query_and_headers() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/hello?who=world", headers={"X-Colour": "green"}) as reply:
            assert (reply.status, await reply.text()) == (200, "hello world green\n")
            assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
        async with client.head(f"{url}/hello") as reply:
            assert (reply.status, await reply.text()) == (200, "")
        assert url.endswith(str(server.port))


async def test_unknown_paths_name_the_known_ones_and_other_methods_are_refused() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    server.add_route("/again", hello)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/nothing") as reply:
            assert (reply.status, await reply.text()) == (404, "no such path; there are /again /hello\n")
        async with client.post(f"{url}/hello", data=b"x") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")


async def test_an_announced_path_is_not_missing_while_its_owner_starts() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.announce("/metrics")
    async with serving(server) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/metrics") as reply:
            assert (reply.status, await reply.text()) == (503, "the agent is starting; ask again\n")
        server.add_route("/metrics", hello)
        async with client.get(f"{url}/metrics") as reply:
            assert reply.status == 200


def test_a_path_has_one_owner() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    with pytest.raises(ValueError, match="/hello is already taken"):
        server.add_route("/hello", hello)


async def test_a_failing_handler_is_logged_and_harms_nothing(logs: Logs) -> None:
    async def broken(_: HttpRequest) -> Reply:
        raise RuntimeError("secret detail")

    server = HttpServer("127.0.0.1", 0)
    server.add_route("/broken", broken)
    server.add_route("/hello", hello)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/broken") as reply:
            assert reply.status == 500
            assert "secret" not in await reply.text()
        async with client.get(f"{url}/hello") as reply:
            assert reply.status == 200
    assert [event["path"] for event in logs if event["event"] == "http_handler_failed"] == ["/broken"]


async def test_a_handler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, logs: Logs) -> None:
    async def hangs(_: HttpRequest) -> Reply:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(web, "HANDLER_SECONDS", 0.05)
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hangs", hangs)
    async with (
        serving(server) as url,
        aiohttp.ClientSession() as client,
        client.get(f"{url}/hangs") as reply,
    ):
        assert (reply.status, await reply.text()) == (503, "no answer within 0.05 s\n")
    assert any(event["event"] == "http_handler_late" for event in logs)


@pytest.mark.timeout(10)  # it would hang, were the hanging handler waited for
async def test_stopping_ends_idle_and_hanging_connections() -> None:
    assert 2 * web.STOP_SECONDS < 1  # aiohttp waits this long at most, then cancels
    entered = anyio.Event()

    async def hangs(_: HttpRequest) -> Reply:
        entered.set()
        await anyio.sleep_forever()
        raise AssertionError

    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hangs", hangs)
    server.add_route("/hello", hello)

    async def ask(client: aiohttp.ClientSession, url: str) -> None:
        with pytest.raises(aiohttp.ClientError):
            await client.get(url)

    async with (
        aiohttp.ClientSession() as idle,
        aiohttp.ClientSession() as busy,
        anyio.create_task_group() as outer,
        serving(server) as url,
    ):
        async with idle.get(f"{url}/hello") as reply:
            assert reply.status == 200
        outer.start_soon(ask, busy, f"{url}/hangs")
        await entered.wait()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    entered, cancelled = anyio.Event(), anyio.Event()

    async def hangs(_: HttpRequest) -> Reply:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hangs", hangs)
    async with serving(server):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /hangs HTTP/1.1\r\nHost: x\r\n\r\n")
        await entered.wait()
        writer.close()
        await writer.wait_closed()
        with anyio.fail_after(30):
            await cancelled.wait()


async def test_bytes_that_are_no_http_are_refused_and_harm_nothing() -> None:
    server = HttpServer("127.0.0.1", 0)
    server.add_route("/hello", hello)
    async with serving(server) as url, aiohttp.ClientSession() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        with anyio.fail_after(30):
            assert (await reader.read(12)).startswith(b"HTTP/1.")
        writer.close()
        async with client.get(f"{url}/hello") as reply:
            assert reply.status == 200


async def test_a_busy_port_is_told_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            await HttpServer("127.0.0.1", port).serve()
    assert str(caught.value) == (
        f"HTTP cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "stop what holds it, or change http.address or http.port"
    )


async def test_a_name_with_two_addresses_is_served_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]

    async def resolve(*_: object, **__: object) -> object:
        return answers

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    server = HttpServer("twice", 0)
    server.add_route("/hello", hello)
    async with serving(server):
        for address in ("127.0.0.2", "127.0.0.1"):
            reader, writer = await asyncio.open_connection(address, server.port)
            writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
            with anyio.fail_after(5):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_stopping_before_the_first_connection_frees_the_port() -> None:
    server = HttpServer("127.0.0.1", 0)
    async with serving(server):
        pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


@pytest.mark.parametrize("address", ["192.0.2.7", "not an address"])
async def test_an_address_that_is_not_ours_names_the_key(address: str) -> None:
    with pytest.raises(CannotListen, match=r"http\.address"):
        await HttpServer(address, 0).serve()
