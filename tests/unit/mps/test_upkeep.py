"""Upkeep of a folder that a pod changes again and again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.kit.tasks import Cell
from agent.mps import shared_memory, upkeep


def test_who_closes_shared_memory_again_and_again_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    manager: Any = SimpleNamespace()
    kept = upkeep.Upkeep(manager, Path("/run/x"), 1 << 20, Cell(None))
    folders: Any = SimpleNamespace(shm=SimpleNamespace(is_mount=lambda: True))
    now = 0.0
    monkeypatch.setattr("agent.mps.upkeep.time.monotonic", lambda: now)
    monkeypatch.setattr(shared_memory, "limit", lambda *_: None)
    monkeypatch.setattr(shared_memory, "restore", lambda _: True)
    for _ in range(13):  # two minutes
        kept._keep_memory("GPU-1", folders, sweeping=False)
        now += 10.0
    assert [each["event"] for each in logs] == ["mps_shared_memory_opened"] * 3
