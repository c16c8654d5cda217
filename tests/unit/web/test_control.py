"""The control socket, asked by the client of the command line."""

import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.web.control import NAME, AgentRefused, AgentUnreachable, CommandRefused, ControlServer, ask


async def _echo(request: Mapping[str, object]) -> object:
    return request


async def _refuse(_: Mapping[str, object]) -> object:
    raise CommandRefused("not today: ask tomorrow")


async def _fail(_: Mapping[str, object]) -> object:
    raise RuntimeError("a fault of ours")


@asynccontextmanager
async def serving() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gna") as folder:
        path = Path(folder) / NAME
        server = ControlServer(path)
        for command, handler in (("echo", _echo), ("refuse", _refuse), ("fail", _fail)):
            server.add(command, handler)
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve)
            with anyio.fail_after(5):
                while not path.is_socket():
                    await anyio.sleep(0.005)
            yield path
            group.cancel_scope.cancel()
        assert not path.exists()


async def ask_aside(path: Path, command: str) -> object:
    return await anyio.to_thread.run_sync(lambda: ask(path, command, gpu="GPU-1"))


async def test_a_command_is_answered() -> None:
    async with serving() as path:
        assert await ask_aside(path, "echo") == {"command": "echo", "gpu": "GPU-1"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("refuse", "not today: ask tomorrow"),
        ("fail", "its log says why"),
        ("dance", "no such command; there are echo, fail, refuse"),
    ],
)
async def test_a_no_comes_in_words(command: str, said: str, logs: list[MutableMapping[str, Any]]) -> None:
    async with serving() as path:
        with pytest.raises(AgentRefused, match=said):
            await ask_aside(path, command)
    assert [entry["event"] for entry in logs] == (["command_failed"] if command == "fail" else [])


async def test_a_caller_that_speaks_no_json_or_leaves_harms_nobody() -> None:
    async with serving() as path:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\n", b"[]\n", b"{}\n", b""):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(data)
        assert await ask_aside(path, "echo")


async def test_no_agent_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match="start it, or run this inside its pod"):
        await ask_aside(tmp_path / "none", "echo")
