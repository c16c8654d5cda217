"""Fixtures of the room's tests."""

from typing import Any

import pytest


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are of no use in virtual time."""

    async def run_sync(call: Any, *arguments: Any, **_: Any) -> Any:
        return call(*arguments)

    monkeypatch.setattr("anyio.to_thread.run_sync", run_sync)
