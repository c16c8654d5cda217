"""Waits of the extender that end with what they wait for are long here: a busy machine is late."""

import pytest

from agent.extender import binder, gangs
from tests.pace import scaled


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of what comes after such a wait have it short again."""
    monkeypatch.setattr(gangs, "SHOWN_SECONDS", scaled(10.0))
    # How long what is kept for a gang stays, where a pod of it was refused, or was shown no more.
    monkeypatch.setattr(gangs, "REFUSED_SECONDS", scaled(50.0))
    for room in (binder, gangs):
        monkeypatch.setattr(room, "BIND_SECONDS", scaled(30.0))
