"""Containers as the kubelet makes them of the agent's mounts: a mount namespace with a daemon's folders."""

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from agent.mps.binary import Program
from agent.mps.directories import Directories

# The folder that the container runtime would make for the mount lies in a tmpfs that only this namespace has.
ENTER = """
mount -t tmpfs pod /mnt && mkdir /mnt/pipe && mount --bind "$1" /mnt/pipe &&
    mount -o remount,ro,bind /mnt/pipe && mount --bind "$2" /dev/shm || exit 1
exec setpriv --reuid="$3" --regid="$3" --clear-groups sh -c '
    echo ready
    while read -r command; do eval "$command" </dev/null; echo "= $?"; done'
"""
NOBODY = 65534
TRIES = 50


class Container:
    """A shell with a GPU's folders: /mnt/pipe, where a container has another path, and /dev/shm."""

    def __init__(self, program: Program, folders: Directories, user: int = 0) -> None:
        self._program = program
        self._folders = folders
        self._user = user

    def __enter__(self) -> Self:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]
        self._shell = subprocess.Popen(
            [*command, str(self._folders.pipe), str(self._folders.shm), str(self._user)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._shell.stdout
        assert self._shell.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.communicate(timeout=10)

    def run(self, command: str, user: int = 0) -> tuple[int, str]:
        """The exit code and the output of a new process of the container. Blocks."""
        assert self._shell.stdin
        assert self._shell.stdout
        if user:
            command = f"setpriv --reuid={user} --regid={user} --clear-groups sh -c '{command}'"
        self._shell.stdin.write(f"{{ {command}; }} 2>&1\n")
        self._shell.stdin.flush()
        said: list[str] = []
        for line in self._shell.stdout:
            if line.startswith("= "):
                return int(line[2:]), "".join(said)
            said.append(line)
        raise AssertionError(f"the container ended: {said}")

    def ask(self, question: str, user: int = 0) -> str:
        """The daemon's answers to the control program in the container. Blocks.

        It turns other callers away while it answers one, as the agent.
        """
        command = f"echo {question} | CUDA_MPS_PIPE_DIRECTORY=/mnt/pipe timeout 5 {self._program.path}"
        for _ in range(TRIES):
            said = self.run(command, user)[1].strip()
            if said and "Cannot" not in said:
                break
            time.sleep(0.1)
        return said


@contextmanager
def again_and_again(work: Callable[[], None]) -> Iterator[None]:
    """A thread that does `work` without a pause while the context is open."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
