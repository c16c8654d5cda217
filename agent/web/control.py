"""The agent's control socket: a person's commands to the running agent, on this node only.

One JSON object a line each way: `{"command": "status", ...}` is answered by `{"ok": true, "result": ...}`
or `{"ok": false, "error": "..."}`. The room of a command adds it. Only root may connect (mode 0600).
"""

import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import structlog
from anyio.abc import SocketListener, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

log = structlog.get_logger()

NAME: Final = "agent.sock"
REQUEST_BYTES: Final = 65536
REQUEST_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0  # each command has a shorter deadline of its own

Handler = Callable[[Mapping[str, object]], Awaitable[object]]


class CommandRefused(Exception):
    """A command that is not carried out; the text goes to the person who gave it."""


def _bound(path: Path) -> socket.socket:
    """A listening socket; one that a dead agent left there is replaced. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class ControlServer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._handlers: dict[str, Handler] = {}

    def add(self, command: str, handler: Handler) -> None:
        """Answer `command` with the result of `handler`: any value of JSON."""
        if command in self._handlers:
            raise ValueError(f"command {command} is already taken")
        self._handlers[command] = handler

    async def serve(self) -> None:
        """Serve until cancelled. Raises OSError where the socket cannot be made."""
        bound = await anyio.to_thread.run_sync(_bound, self.path)
        listener = await SocketListener.from_socket(bound)
        try:
            async with listener:
                await listener.serve(self._serve_one)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial(self.path.unlink, missing_ok=True))

    async def _serve_one(self, stream: SocketStream) -> None:
        async with stream:
            try:
                with anyio.fail_after(REQUEST_SECONDS):
                    line = await BufferedByteReceiveStream(stream).receive_until(b"\n", REQUEST_BYTES)
                with anyio.fail_after(ANSWER_SECONDS):
                    reply = await self._reply(line)
                    await stream.send(json.dumps(reply).encode() + b"\n")
            except (TimeoutError, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError):
                return  # a caller that left, or that does not speak this protocol

    async def _reply(self, line: bytes) -> dict[str, object]:
        try:
            request = json.loads(line)
            handler = self._handlers[request["command"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            known = ", ".join(sorted(self._handlers))
            return {"ok": False, "error": f"no such command; there are {known}"}
        try:
            return {"ok": True, "result": await handler(request)}
        except CommandRefused as error:
            return {"ok": False, "error": str(error)}
        except Exception:
            log.exception("command_failed", command=request["command"])
            return {"ok": False, "error": "the agent failed to carry this out; its log says why"}


# Asks the running agent over its control socket; blocks, for the command line.

DEADLINE_SECONDS = 10.0
RELEASE_SECONDS = 25.0  # the driver may take its time to let go


class AgentUnreachable(Exception):
    """The agent did not answer; the text names the remedy."""


class AgentRefused(Exception):
    """The agent answered no; the text is its own."""


def ask(path: Path, command: str, *, deadline: float = DEADLINE_SECONDS, **arguments: object) -> Any:  # noqa: ANN401  whatever the command answers
    """Send one command; the result. Raises AgentUnreachable, AgentRefused. `deadline` in seconds."""
    request = json.dumps({"command": command, **arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(deadline)
            connection.connect(str(path))
            connection.sendall(request)
            data = b""
            while not data.endswith(b"\n") and (part := connection.recv(1 << 20)):
                data += part
        reply = json.loads(data)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise AgentUnreachable(
            f"no agent answers on {path}: start it, or run this inside its pod (folder: host.run)"
        ) from error
    except PermissionError as error:
        raise AgentUnreachable(f"{path} may be used by root only") from error
    except (OSError, ValueError) as error:
        raise AgentUnreachable(f"the agent on {path} did not answer: {error}") from error
    if not reply["ok"]:
        raise AgentRefused(reply["error"])
    return reply["result"]
