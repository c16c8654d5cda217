"""A changed configuration file, taken up without a restart as far as that goes."""

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from agent.app.agent import Agent
from agent.kit import logs
from agent.kit.configuration import ConfigurationError
from agent.kit.files import FolderGone, watching
from agent.modes.desired import catalog_of
from agent.settings import Settings

log = structlog.get_logger()

# Keys that take effect at once; all others need a restart, and the agent says so.
LIVE = frozenset({"defaultMode", "layouts", "modes", "whenBusy", "unexplainedProcesses", "logging"})
LOOK_SECONDS = 60.0
# The kubelet swaps this link in one step when a ConfigMap changes (atomic writer of projected volumes).
CONFIG_MAP_LINK = "..data"
SETTLE_SECONDS = 0.1  # an editor writes a file in several steps


class Reloader:
    """Loads the configuration again on a signal or when its file changes. A bad one changes nothing."""

    def __init__(self, agent: Agent, load: Callable[[], Settings], file: Path | None) -> None:
        self._agent = agent
        self._settings = agent.core.settings  # in force
        self._problem: str | None = None  # of the newest configuration, while an older one is in force
        agent.core.readiness.follow(self._remarks)
        self._load = load
        self._file = file

    async def run(self) -> None:
        """Follow the file for ever; without a file there is only the signal."""
        if self._file is None:
            await anyio.sleep_forever()
            return
        names = ("", self._file.name, CONFIG_MAP_LINK)
        while True:
            try:
                with anyio.move_on_after(LOOK_SECONDS):
                    async with watching(self._file.parent) as folder:
                        async for change in folder.changes():
                            if change.name in names:
                                break
            except (FolderGone, FileNotFoundError):
                await anyio.sleep(SETTLE_SECONDS)
            except OSError:  # others may have taken all of inotify, and for long
                await anyio.sleep(LOOK_SECONDS)
            await anyio.sleep(SETTLE_SECONDS)
            await self.reload()

    async def reload(self) -> None:
        """Load, check, and put in force what may change while the agent runs."""
        agent = self._agent
        try:
            new = await anyio.to_thread.run_sync(self._load)
        except ConfigurationError as error:
            problem = "; ".join(error.faults)
            if problem != self._problem:
                log.error("configuration_rejected", faults=list(error.faults))
                if agent.cluster:
                    agent.cluster.events.node("ConfigurationRejected", problem, warning=True)
            self._problem = problem
            return
        self._problem = None
        changed = changed_keys(self._settings, new)
        if not changed:
            return
        self._settings = new
        log.info("configuration_changed", keys=sorted(changed), need_restart=sorted(changed - LIVE) or None)
        if "logging" in changed:
            logs.configure(new.logging.level, new.logging.format)
        agent.switcher.when_busy = new.when_busy
        agent.unexplained.strict = new.unexplained_processes == "strict"
        agent.desired.use(catalog_of(new))

    def _remarks(self) -> list[str]:
        if self._problem is None:
            return []
        return [f"the newest configuration was rejected, an older one is in force: {self._problem}"]


def changed_keys(before: Settings, after: Settings) -> set[str]:
    """Top-level keys whose values differ."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return {key for key in new if old[key] != new[key]}
