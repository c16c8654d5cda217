"""Whole GPUs that the kubelet offers although a record says that somebody holds them."""

from time import monotonic

import pytest

from agent.kubelet.wire import Reason, Refused
from agent.model.holding import Holding, Record, Source
from agent.whole.wing import RESOURCE
from tests.unit.whole.test_plugin import Parts


async def test_the_record_at_hand_alone_refuses_nobody() -> None:
    parts = Parts(2)
    parts.hold("GPU-0")
    parts.truth = Record((), ())  # its holder ended a moment ago
    assert await parts.prefer(("GPU-0", "GPU-1"), 2) == ["GPU-0", "GPU-1"]
    assert await parts.allocate("GPU-0") == "GPU-0"
    looks = parts.looks
    assert await parts.allocate("GPU-1") == "GPU-1"  # no reason to ask anybody
    assert parts.looks == looks
    parts.truth = None
    assert (await parts.refusal("GPU-0")).reason is Reason.UNAVAILABLE


async def test_a_gpu_whose_earlier_holder_is_known_to_have_ended_needs_no_reading() -> None:
    parts = Parts(1)
    for pod in ("web-0", "web-1", "web-0"):
        assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]
        assert await parts.allocate("GPU-0") == "GPU-0"
        assert parts.looks == 0
        # A reading that shows nothing proves nothing: the kubelet may record the grant after it.
        parts.truth = Record((), ())
        await parts.refresh()
        parts.truth = Record((Holding("ns", pod, "c", RESOURCE, ("GPU-0",)),), (("ns", pod, "c"),))
        parts.looks = 0
        assert await parts.held_by("GPU-0") == (f"ns/{pod}", "c")
        assert parts.looks == 1
        await parts.refresh()
        assert await parts.held_by("GPU-0") == (f"ns/{pod}", "c")
        parts.truth = Record((), ())
        await parts.refresh()
        parts.looks = 0


async def test_a_reading_from_before_a_grant_does_not_count_as_its_holders_end() -> None:
    parts = Parts(1)
    parts.hold("GPU-0")
    before = parts.cell.value
    parts.truth = Record((), ())
    assert await parts.allocate("GPU-0") == "GPU-0"  # the last holder ended a moment ago
    parts.truth = Record((Holding("ns", "q", "c", RESOURCE, ("GPU-0",)),), (("ns", "q", "c"),))
    for late in (before, Record((), (), began=monotonic())):
        parts.cell.publish(late)
        parts.plugin.refresh()
        assert await parts.held_by("GPU-0") == ("ns/q", "c")


async def test_a_pod_that_was_refused_elsewhere_costs_one_reading() -> None:
    parts = Parts(1)
    assert await parts.allocate("GPU-0") == "GPU-0"
    assert await parts.allocate("GPU-0") == "GPU-0"  # the kubelet has never recorded the first
    assert parts.looks == 1
    parts.truth = None
    assert (await parts.refusal("GPU-0")).reason is Reason.UNAVAILABLE


async def test_what_init_containers_held_goes_on_to_their_own_pod_alone() -> None:
    parts = Parts(2)
    held = Holding("ns", "p", "prepare", RESOURCE, ("GPU-0",), source=Source.CHECKPOINT)
    parts.truth = Record((held,), (("ns", "p", "main"),))
    parts.cell.publish(parts.truth)
    assert await parts.prefer(("GPU-0", "GPU-1"), 1) == ["GPU-1"]
    assert await parts.prefer(("GPU-0", "GPU-1"), 1, must=("GPU-0",)) == ["GPU-0"]
    assert await parts.allocate("GPU-0") == "GPU-0"
    # The checkpoint may go on naming a pod that has ended, and that nobody knows: the kubelet's offer counts.
    nameless = Holding("", "pod with UID u", "main", RESOURCE, ("GPU-0",), source=Source.CHECKPOINT)
    parts.truth = Record((nameless,), (("ns", "q", "main"),))
    parts.cell.publish(parts.truth)
    assert await parts.prefer(("GPU-0",), 1) == ["GPU-0"]
    assert await parts.allocate("GPU-0") == "GPU-0"
    # All containers of that pod have what they ask for: the next request is of another pod.
    main = Holding("ns", "p", "main", RESOURCE, ("GPU-1",))
    parts.truth = Record((held, main), (("ns", "p", "main"),))
    assert await parts.held_by("GPU-0") == ("ns/p", "prepare")


@pytest.mark.parametrize("call", ["prefer", "allocate"])
async def test_holders_are_asked_after_before_a_pod_is_refused_for_them(call: str) -> None:
    """The kubelet, which may have heard of their end first, offers what they hold."""
    parts = Parts(2)

    async def served() -> bool:
        try:
            if call == "prefer":
                return await parts.prefer(("GPU-0", "GPU-1"), 2) == ["GPU-0", "GPU-1"]
            return await parts.allocate("GPU-0") == "GPU-0"
        except Refused:
            return False

    parts.hold("GPU-0")
    assert not await served()
    parts.over = {"p"}
    assert await served()
    assert parts.asked == [["p"]] * 2
    # Nobody is asked where there is enough without.
    parts.hold("GPU-0")
    parts.over = set()
    assert await parts.prefer(("GPU-0", "GPU-1"), 1) == ["GPU-1"]
    assert len(parts.asked) == 2
