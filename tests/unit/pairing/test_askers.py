from agent.model.holding import PairHoldings, PairMember, Record
from agent.model.pod import VGPU
from agent.pairing.resolver import askers
from tests.pods import changed
from tests.unit.pairing.kubelet_model import pod, share


def test_a_pod_that_ends_asks_for_nothing() -> None:
    # Of a StatefulSet the next pod of this size may be waiting while the last one is Terminating.
    waiting, leaving = pod("next", share("main", 20, 10)), pod("last", share("main", 20, 10))
    leaving = changed(leaving, ending=True)
    record = Record((), (("default", "next", "main"), ("default", "last", "main")))
    found = askers(VGPU, PairMember.CORE, 20, record, PairHoldings(), [leaving, waiting], ())
    assert [each.pod.name for each in found] == ["next"]
    assert askers(VGPU, PairMember.CORE, 20, record, PairHoldings(), [leaving], ()) == []


def test_without_a_record_one_that_ends_may_be_asking_and_any_container_of_its_size() -> None:
    two = pod("two", share("first", 20, 10), share("second", 20, 30), share("third", 5, 1))
    leaving = changed(pod("last", share("main", 20, 10)), ending=True)
    found = askers(VGPU, PairMember.CORE, 20, None, PairHoldings(), [leaving, two], ())
    assert [(each.pod.name, each.container.name) for each in found] == [
        ("last", "main"),
        ("two", "first"),
        ("two", "second"),
    ]
