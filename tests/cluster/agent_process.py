"""The agent under test as a process of its own on the host, beside the cluster."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import yaml

from tests.pace import pace, scaled

REPOSITORY = Path(__file__).parents[2]


class AgentProcess:
    """`python -m agent run` with a configuration file; may be started and ended many times."""

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str],
        started: Callable[[int], None],
        arguments: Sequence[str] = (),
        interpreter: Sequence[str] = (sys.executable,),
    ) -> None:
        """`folder` takes configuration and log; `started` gets the pid of every process.

        `arguments` follow on the command line; `interpreter` is Python and its options.
        """
        # A file for every list message that it sends (tests/recording_agent.py).
        self.record: Path | None = None
        self.checkout = REPOSITORY  # the tree whose agent runs
        self._folder = folder
        self._arguments = tuple(arguments)
        self._interpreter = tuple(interpreter)
        self._env = dict(env)
        self._started = started
        self._process: subprocess.Popen[bytes] | None = None
        self._told_to_end = False

    @property
    def log(self) -> Path:
        """The agent's output, of all its lives."""
        return self._folder / "agent.log"

    @property
    def pid(self) -> int | None:
        """Pid of the running agent."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def crashed(self) -> bool:
        """Whether the agent ended by itself."""
        return self._process is not None and not self._told_to_end and self._process.poll() is not None

    def start(self, settings: Mapping[str, object]) -> None:
        """Start it with `settings` (values by key path, such as `injection.strategy`)."""
        if self.pid is not None:
            raise RuntimeError(f"the agent runs already (pid {self.pid})")
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(nested(settings)))
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GPU_NODE_AGENT")
        }
        if self.record:
            environment["RECORD_LISTS"] = str(self.record)
        self._told_to_end = False
        # On a slow machine it has longer to end; an earlier release is run as it is.
        slow = pace() > 1 and self.checkout == REPOSITORY
        module = "tests.recording_agent" if self.record or slow else "agent"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._interpreter, "-m", module, "run", f"--config={config}", *self._arguments],
                cwd=self.checkout,
                env=environment | self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started(self._process.pid)

    def send(self, number: signal.Signals) -> None:
        """Signal the running agent and go on."""
        if self._process is not None:
            self._process.send_signal(number)

    def assert_not_crashed(self) -> None:
        """AssertionError when the agent ended by itself."""
        code = self._process.returncode if self._process and self.crashed else None
        assert code is None, f"the agent ended by itself with {code}; end of its log:\n{self.log_tail()}"

    async def end(self, number: signal.Signals, deadline: float) -> int | None:
        """Signal the agent and wait for its end; its exit code (None: it was not running).

        Raises TimeoutError after `deadline` seconds.
        """
        process = self._process
        if process is None:
            return None
        self._told_to_end = True
        if process.poll() is None:
            process.send_signal(number)
        with anyio.move_on_after(scaled(deadline)):
            while process.poll() is None:
                await anyio.sleep(0.005)
            self._process = None
            return process.returncode
        raise TimeoutError(
            f"the agent still runs {deadline:g} s after {number.name}; end of its log:\n{self.log_tail()}"
        )

    def log_tail(self, characters: int = 3000) -> str:
        """The last that the agent wrote."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else "(no log)"


def nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *blocks, key = path.split(".")
        block = tree
        for name in blocks:
            block = block.setdefault(name, {})
        block[key] = value
    return tree
