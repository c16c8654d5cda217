"""Units that a kubelet has forgotten while the API server calls their pod alive."""

from agent.holdings.record import Evidence, View, join
from agent.model.holding import Holding, Record
from tests.pods import a_pod

RESOURCE, INIT, MAIN = "nvidia.com/gpu", "GPU-0", "GPU-1"
LISTED = Record((Holding("ns", "p", "main", RESOURCE, (MAIN,)),), (("ns", "p", "main"),))
ENTRIES = {
    ("u", "prepare", RESOURCE): frozenset({INIT}),
    ("u", "main", RESOURCE): frozenset({MAIN}),
}


def test_what_no_list_shows_outlasts_a_kubelet_that_forgot_it_and_lists_the_pod_again() -> None:
    view = View({"u": a_pod("ns", "p", (), "u", phase="Running")}, complete=True)
    record = join(Evidence(), LISTED, ENTRIES, view, same_kubelet=True, fresh=True, read=True)
    # It has just started, has heard of nobody, and leaves the pod out of its checkpoint.
    record = join(record, Record(), {}, view, same_kubelet=False, fresh=True)
    assert {each.ids for each in record.joined.holdings} == {(INIT,), (MAIN,)}
    for _ in range(2):
        record = join(record, LISTED, {}, view, same_kubelet=True, fresh=True)
        assert {each.ids for each in record.joined.holdings} == {(INIT,), (MAIN,)}
    over = View({"u": a_pod("ns", "p", (), "u", phase="Failed")}, complete=True)
    record = join(record, Record(), {}, over, same_kubelet=True, fresh=True)
    assert record.joined.holdings == ()
