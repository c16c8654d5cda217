"""Shares of claims where the configuration lets no pod be root."""

import pytest

from agent.model.holding import Holder
from agent.model.modes import SHARES
from agent.model.resource_claim import ClaimedShare
from agent.modes.wing import SetUpFailed
from agent.mps.pods import RootCheck
from tests.unit.mps.test_remarks import NEW, Scene


class NoRoot(RootCheck):
    """No container may run as root."""

    def named(self, namespace: str, pod: str, container: str) -> str | None:
        return None


async def test_a_claim_that_other_pods_may_use_later_is_refused_where_no_pod_may_be_root() -> None:
    """The kubelet asks once for a claim: for the second pod nobody is asked."""
    scene = Scene("mps.rootPods=refuse", "simulator.profile=dgx-h200")
    scene.seen(NEW)
    scene.wing._root_check = NoRoot(None)
    share, holders = ClaimedShare(scene.uuid, SHARES, 30, 8, "c", "s-1"), [Holder("ns", "p", "main")]
    with pytest.raises(SetUpFailed, match="ResourceClaimTemplate"):
        scene.wing.claimed(share, holders, owned=False)
    assert scene.wing.claimed(share, holders, owned=True)
    scene.wing._root_check = None
    assert scene.wing.claimed(share, holders, owned=False)
