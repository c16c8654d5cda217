"""How often the configuration is loaded."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agent.app import reload
from agent.app.reload import LOOK_SECONDS, Reloader
from agent.kit.configuration import ConfigurationError
from tests.virtual_time import in_virtual_time


def test_without_inotify_the_file_is_read_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of the node may have taken all instances of it."""
    loads = 0

    def exhausted(_: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def load() -> Any:
        nonlocal loads
        loads += 1
        raise ConfigurationError(["none"])

    async def inline(call: Any) -> Any:
        """Threads are of no use in virtual time."""
        return call()

    @in_virtual_time
    async def run() -> None:
        core = SimpleNamespace(settings=None, readiness=SimpleNamespace(follow=lambda _: None))
        reloader = Reloader(SimpleNamespace(core=core, cluster=None), load, Path("c.yaml"))  # type: ignore[arg-type]
        with anyio.move_on_after(10 * LOOK_SECONDS + 5):
            await reloader.run()
        assert 9 <= loads <= 10

    monkeypatch.setattr(reload, "watching", exhausted)
    monkeypatch.setattr("anyio.to_thread.run_sync", inline)
    run()
