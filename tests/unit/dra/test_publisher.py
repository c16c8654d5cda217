"""The writer of slices, beside those that others write."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.dra.publisher import SlicePublisher
from agent.dra.slices import Published
from agent.kit.tasks import Cell
from agent.model.pod import Metadata
from agent.model.resource_claim import DRIVER


class Enough(Exception):
    """The rest of the round is of no interest."""


async def test_foreign_slices_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(_: Path) -> None:
        raise Enough

    async def delete(_: str) -> None:
        pass

    said: list[str] = []
    offers: Any = SimpleNamespace(look=look, is_ours=lambda _: False)
    publisher = SlicePublisher(
        None,  # type: ignore[arg-type]
        "n",
        lambda: (None, ""),
        offers,
        Cell(frozenset()),
        Cell(True),
        lambda _, text: said.append(text),
        Path("/sys"),
    )
    monkeypatch.setattr(publisher, "_delete", delete)
    publisher.reflector.synced = publisher._supported = True
    for number in range(100):
        strange = Published(Metadata("strange", uid=f"u{number // 2}"), {"driver": DRIVER})
        publisher.reflector.items.publish({strange.metadata.uid: strange})
        with pytest.raises(Enough):
            await publisher._round()
    assert len(said) == 50
    assert publisher._told == {"u49"}
