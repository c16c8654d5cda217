"""How long who asks the agent waits."""

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.status import commands
from agent.status.commands import Commands
from agent.status.report import LastHolders
from agent.web.control import DEADLINE_SECONDS
from tests.virtual_time import in_virtual_time

GPU = "GPU-00000000-0000-0000-0000-000000000001"


class Cordons:
    async def add(self, uuid: str, reason: str) -> None:
        """Written at once."""


@pytest.mark.parametrize("command", ["status", "cordon"])
@in_virtual_time
async def test_a_kubelet_that_says_nothing_keeps_nobody_from_an_answer(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: dict[str, Callable[[Mapping[str, object]], Awaitable[Any]]] = {}
    state = SimpleNamespace(uuid=GPU, gpu=SimpleNamespace(index=0))
    holdings = SimpleNamespace(refresh=anyio.sleep_forever, began=monotonic() - 7.0)
    cell: Cell[Record | None] = Cell(None)
    last = LastHolders(cell)
    sources = cast("Any", SimpleNamespace(holdings=holdings, cordons=Cordons(), last=last))
    served = Commands(sources)
    monkeypatch.setattr(commands, "report", lambda _: {"agent": "runs"})
    monkeypatch.setattr(served, "_named", lambda _: state)
    served.add_to(cast("Any", SimpleNamespace(add=handlers.__setitem__)))
    with anyio.fail_after(DEADLINE_SECONDS / 2):
        answer = await handlers[command]({"gpu": GPU})
    cordoned = {"uuid": GPU, "index": 0, "waitingFor": None, "holdersAgeSeconds": None}
    assert answer == {"status": {"agent": "runs"}, "cordon": cordoned}[command]
    # Nobody has held anything else for longer than the newest reading is old.
    held = (Holding("ml", "a", "main", "nvidia.com/gpu", (GPU,)),)
    cell.publish(Record(held, began=monotonic() - 600.0))
    if command == "cordon":
        answer = await handlers[command]({"gpu": GPU})
        assert answer["waitingFor"] == ["ml/a"]
        assert 7 <= answer["holdersAgeSeconds"] < 600
