"""Without a record: the one that asks is there by whatever shows it in the first second of its call."""

import math
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.holding import PairMember, Record
from agent.pairing.resolver import PairRefused
from tests.unit.pairing.kubelet_model import Admission, KubeletModel, pod, share
from tests.virtual_time import in_virtual_time


class Hanging(KubeletModel):
    """A kubelet whose lists take so many seconds, and fail."""

    seconds = 0.0

    async def look(self, deadline: float = 1.0) -> Record:
        await anyio.sleep(min(deadline, self.seconds))
        raise PodResourcesUnavailable("no kubelet here")


async def asked(kubelet: KubeletModel, then: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """A pod asks that the watch does not show yet; the answer is when it is granted its share."""
    new = pod("new", share("main", 30, 10))
    kubelet.taken_up[new.key] = Admission(new)
    kubelet.api[new.key], kubelet.cached = new, False
    async with anyio.create_task_group() as group:
        group.start_soon(then)
        await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
    assert kubelet.pairing.ledger.reservations[0].holder.pod == "new"
    return anyio.current_time()


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize("seconds", [0.2, 0.7, 2.0, math.inf])
@in_virtual_time
async def test_reading_that_hangs_costs_the_asker_time_alone(seconds: float, *, mute: bool) -> None:
    kubelet = Hanging()
    kubelet.seconds = seconds

    async def shows() -> None:
        await anyio.sleep(0.1)
        kubelet.cached = not mute

    assert await asked(kubelet, shows) < min(2 * seconds + 1, 20)


@pytest.mark.parametrize(("seconds", "within"), [(0.2, 2), (1.5, 5)], ids=["one is lost", "none comes"])
@in_virtual_time
async def test_first_lists_that_are_lost_cost_the_asker_nothing(seconds: float, within: float) -> None:
    """The watch shows it a moment later; the API server answers lists so much later still."""
    kubelet = KubeletModel()
    kubelet.records_readable = kubelet.reachable = False

    async def shows() -> None:
        await anyio.sleep(0.1)
        kubelet.cached = True
        await anyio.sleep(seconds)
        kubelet.reachable = True

    assert await asked(kubelet, shows) < within


class Stumbling(KubeletModel):
    """A kubelet whose first list is on its way for so many seconds, and which refuses all others."""

    seconds = 7.0

    async def look(self, deadline: float = 1.0) -> Record:
        if self.lists:
            raise PodResourcesUnavailable("no kubelet here")
        self.lists = 1
        with anyio.fail_after(deadline):
            await anyio.sleep(self.seconds)
        return await super().look()


@in_virtual_time
async def test_answer_that_is_on_its_way_is_waited_for() -> None:
    """As storm 1000072: after half a second it was given up, and asked for again in vain."""
    kubelet = Stumbling()
    waits, static = pod("waits", share("main", 30, 10)), pod("static-node1", share("main", 30, 10))
    kubelet.api[waits.key], kubelet.taken_up[static.key] = waits, Admission(static)
    with pytest.raises(PairRefused, match="any of default/waits, default/static-node1"):
        await kubelet.pairing.prefer(PairMember.CORE, 30, kubelet.free_cores())
