"""The embedded kubelet's claims: what it gives back by itself, and when."""

from pathlib import Path
from typing import Any, cast

import anyio

from agent.simulator.kubelet.claim_state import ClaimInfo
from agent.simulator.kubelet.claims import RECONCILE_SECONDS, ClaimManager
from tests.virtual_time import in_virtual_time


class Manager(ClaimManager):
    """Pod `p` refers to a claim; says whose claims were given back."""

    def __init__(self) -> None:
        super().__init__(Path("unused"), cast("Any", None), cast("Any", None))
        self._claims = {("ns", "c"): ClaimInfo("u", "ns", "c", {}, {"p"})}
        self.gone: list[str] = []

    async def unprepare(self, uid: str) -> None:
        self.gone.append(uid)


@in_virtual_time
async def test_a_kubelet_that_has_not_heard_of_pods_takes_none_for_gone() -> None:
    manager, ready = Manager(), False
    async with anyio.create_task_group() as group:
        group.start_soon(manager.reconcile, list, lambda: ready)
        await anyio.sleep(2.5 * RECONCILE_SECONDS)
        assert not manager.gone
        ready = True
        await anyio.sleep(RECONCILE_SECONDS)
        assert manager.gone == ["p"]
        group.cancel_scope.cancel()
