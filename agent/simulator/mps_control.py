"""A stand-in for NVIDIA's `nvidia-cuda-mps-control`, for the demo on machines without it.

It answers what the agent asks, as the real program of driver 550 does without a GPU, and starts no server.
Tests of the agent run against the real program. `install` writes it as a program of that name.
"""

import fcntl
import os
import re
import signal
import socket
import sys
from pathlib import Path

NAME = "nvidia-cuda-mps-control"
MULTI_USER = "-multiuser-server"


def install(folder: Path) -> Path:
    """Write the program into `folder`; its path. Blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / NAME
    text = Path(__file__).read_text(encoding="utf-8")
    program.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    program.chmod(0o755)
    return program


class Daemon:
    """The state of one daemon, and its answers."""

    def __init__(self) -> None:
        self.percentage = 100.0
        self.over = False

    def answer(self, line: str) -> str:
        """The answer to one command, perhaps empty."""
        words = line.split()
        match words:
            case ["get_default_active_thread_percentage"]:
                return str(self.percentage)
            case ["set_default_active_thread_percentage", value]:
                if re.fullmatch(r"\d{1,3}", value) and 0 < int(value) <= 100:
                    self.percentage = float(value)
                return str(self.percentage)
            case ["get_server_list"] | ["start_server", *_]:
                return ""
            case ["quit", *_]:
                self.over = True
                return ""
            case [
                "get_server_status" | "get_client_list" | "shutdown_server" | "terminate_client",
                server,
                *_,
            ]:
                return f"Server {server} not found"
        return f'Unknown command "{words[0]}"' if words else ""


def serve(pipe: Path) -> None:
    """Go into the background and serve one client after the other until one asks it to quit."""
    lock = (pipe / "control_lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("An instance of this daemon is already running")
    (pipe / "control").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(pipe / "control"))
    listener.listen(16)
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    daemon = Daemon()
    while not daemon.over:
        client, _ = listener.accept()
        with client, client.makefile("rw", encoding="utf-8") as stream:
            lines = [daemon.answer(line) for line in stream]
            stream.write("".join(f"{line}\n" for line in lines if line))


def ask(pipe: Path) -> None:
    """Hand the commands on standard input to the daemon and print what it says."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(pipe / "control"))
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        connection.sendall(sys.stdin.buffer.read())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("r", encoding="utf-8") as answers:
            sys.stdout.write(answers.read())


def main(arguments: list[str]) -> None:
    """The program."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108  NVIDIA's default
    if "-d" in arguments:
        serve(pipe)
    else:
        ask(pipe)


if __name__ == "__main__":
    main(sys.argv[1:])
