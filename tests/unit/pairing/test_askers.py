from agent.model.demand import VGPU
from agent.model.ledger import PairHoldings, PairMember
from agent.pairing.requester import askers
from tests.pods import changed
from tests.unit.pairing.kubelet_model import pod, share


def test_a_pod_that_ends_asks_for_nothing() -> None:
    # Of a StatefulSet the next pod of this size may be waiting while the last one is Terminating.
    waiting, leaving = pod("next", share("main", 20, 10)), pod("last", share("main", 20, 10))
    leaving = changed(leaving, ending=True)
    found = askers(VGPU, PairMember.CORE, 20, None, PairHoldings(), [leaving, waiting], ())
    assert [each.pod.name for each in found] == ["next"]
    assert askers(VGPU, PairMember.CORE, 20, None, PairHoldings(), [leaving], ()) == []
