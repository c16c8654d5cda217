"""Asks the running agent over its control socket; blocks, for the command line."""

import json
import socket
from pathlib import Path
from typing import Any

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
