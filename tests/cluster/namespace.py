"""A private mount and pid namespace in which all programs of a node live.

The host's mount table never changes, and when the namespace's process 1 dies the kernel kills whatever runs
inside, pods included: nothing has to be found and ended one by one. On the host's side a program is a child
of its `nsenter`.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.processes import Identity, alive, children, identify, send, wait_gone
from tests.cluster.waiting import NotYet, RigError, eventually


class Namespace:
    """Starts process 1 on `start()`; `stop()` ends everything inside."""

    def __init__(self, init: Path, network: bool = False) -> None:
        """`init` is a program that sleeps and reaps; `network`: with an empty network of its own."""
        self._init_program = init
        self._kinds = ["--mount", "--pid", *(["--net"] if network else [])]
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init: Identity | None = None

    @property
    def init(self) -> Identity:
        """Process 1, as the host sees it."""
        if self._init is None:
            raise RigError("the namespace is not up")
        return self._init

    def start(self) -> None:
        """Make the namespace. Needs root."""
        argv = ["unshare", *self._kinds, "--propagation", "private", "--fork", "--mount-proc"]
        # Its own session: a Ctrl-C at the terminal is for pytest, which then takes the cluster down in order.
        self._unshare = subprocess.Popen(
            [*argv, "--kill-child", str(self._init_program)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._init = eventually(self._find_init, timeout=10, what="private namespace", interval=0.005)
        # The kubelet needs a shared root for volumes that propagate; shared only with what is inside.
        self.run(["mount", "--make-rshared", "/"])

    def _find_init(self) -> Identity:
        assert self._unshare is not None
        if self._unshare.poll() is not None:
            _, reason = self._unshare.communicate()
            raise RigError(
                f"no private mount and pid namespace ({reason.decode().strip()}): "
                "run the cluster tests as root with CAP_SYS_ADMIN"
            )
        for pid in children(self._unshare.pid):
            identity = identify(pid)
            # Once process 1 runs its own program, unshare has made all mounts.
            if identity and Path(f"/proc/{pid}/comm").read_text().strip() == self._init_program.name:
                return identity
        raise NotYet("unshare has no child that runs our process 1")

    def stop(self) -> None:
        """End every process inside. The namespace's mounts go with the last of them."""
        if self._init is not None:
            send(self._init, signal.SIGKILL)
        if self._unshare is not None:
            self._unshare.wait(10)
            if self._unshare.stderr is not None:
                self._unshare.stderr.close()
        if self._init is not None and not wait_gone([self._init], 10):
            raise RigError(f"process 1 of the test cluster (pid {self._init.pid}) does not die")
        self._unshare = self._init = None

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs inside. Paths must be absolute: the working directory is `/`."""
        return ["nsenter", f"--target={self.init.pid}", *self._kinds, "--wd=/", "--", *argv]

    def run(self, argv: Sequence[str], *, timeout: float = 30) -> str:
        """Run a command inside to its end; return its standard output. Raises RigError when it fails."""
        done = subprocess.run(
            self.wrap(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RigError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def bind(self, source: Path, target: Path) -> None:
        """Show `source` at `target`, inside only. `target` must exist."""
        self.run(["mount", "--bind", str(source), str(target)])


class Program:
    """A long-running program inside a namespace; may be started and stopped many times."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        namespace: Namespace,
        log: Path,
        env: Mapping[str, str],
        stop_signal: signal.Signals = signal.SIGTERM,
        grace: float = 5.0,
    ) -> None:
        """`grace` is how long (seconds) the program may take after `stop_signal` before SIGKILL."""
        self.name = name
        self.log = log
        self._argv = list(argv)
        self._namespace = namespace
        self._env = dict(env)
        self._stop_signal = stop_signal
        self._grace = grace
        self._nsenter: subprocess.Popen[bytes] | None = None
        self._identity: Identity | None = None

    @property
    def running(self) -> bool:
        return self._identity is not None and alive(self._identity)

    @property
    def pid(self) -> int:
        """Pid on the host. Raises RigError when the program does not run."""
        if self._identity is None or not alive(self._identity):
            raise RigError(f"{self.name} does not run; end of its log:\n{self.log_tail()}")
        return self._identity.pid

    def start(self) -> None:
        """Start the program; returns when its process exists, not when it is ready."""
        if self.running:
            raise RigError(f"{self.name} runs already")
        with self.log.open("ab") as log:
            self._nsenter = subprocess.Popen(
                self._namespace.wrap(self._argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        self._identity = eventually(self._find, timeout=5, what=f"start of {self.name}", interval=0.002)

    def _find(self) -> Identity:
        assert self._nsenter is not None
        if self._nsenter.poll() is not None:
            raise RigError(f"{self.name} ended at once; end of its log:\n{self.log_tail()}")
        for pid in children(self._nsenter.pid):
            if identity := identify(pid):
                return identity
        raise NotYet("nsenter has no child")

    def stop(self, number: signal.Signals | None = None) -> None:
        """Signal the program and wait until it is gone; SIGKILL when its grace is over."""
        identity, self._identity = self._identity, None
        if identity is not None:
            send(identity, number or self._stop_signal)
            if not wait_gone([identity], self._grace):
                send(identity, signal.SIGKILL)
                wait_gone([identity], 5)
        if self._nsenter is not None:
            self._nsenter.wait(5)
            self._nsenter = None

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that the program wrote."""
        if not self.log.exists():
            return "(no log)"
        size = self.log.stat().st_size
        with self.log.open("rb") as handle:
            handle.seek(max(0, size - 64 * 1024), os.SEEK_SET)
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-lines:])
