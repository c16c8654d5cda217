"""Units that a kubelet has forgotten while the API server calls their pod alive."""

from pathlib import Path

import pytest

from agent.holdings import holdings
from agent.holdings.record import LAG_SECONDS, Evidence, View, join
from agent.model.holding import Holding, PairHoldings, PairMember, Record, Source
from agent.model.pod import VGPU, Container, Stage
from agent.pairing.resolver import askers
from tests.pods import a_pod
from tests.unit.holdings.record_node import Node

RESOURCE, INIT, MAIN = "nvidia.com/gpu", "GPU-0", "GPU-1"
LISTED = Record((Holding("ns", "p", "main", RESOURCE, (MAIN,)),), (("ns", "p", "main"),))
ENTRIES = {
    ("u", "prepare", RESOURCE): frozenset({INIT}),
    ("u", "main", RESOURCE): frozenset({MAIN}),
}


@pytest.mark.parametrize("contested", [False, True])
def test_who_lives_keeps_what_a_kubelet_lost_though_it_lists_the_pod(contested: bool) -> None:
    """It lost its checkpoint: the container runs on, on a GPU that this kubelet offers to anybody."""
    view = View({"u": a_pod("ns", "p", (), "u", phase="Running")}, complete=True)
    names, entries = LISTED.containers, {("u", "main", RESOURCE): frozenset({MAIN})}
    record = join(Evidence(), LISTED, entries, view, same_kubelet=True, fresh=True, read=True)
    view = View({}, complete=True, contested=frozenset("u")) if contested else view
    bare, other = Record((), names), {("x", "m", RESOURCE): frozenset({INIT})}
    for same, listed in ((False, Record()), (True, Record()), (True, bare), (True, bare)):
        record = join(record, listed, other, view, same_kubelet=same, fresh=True, read=True)
        held = {each.ids: each.source for each in record.joined.holdings if each.pod == "p"}
        assert held.keys() == {(MAIN,)}
    assert held == {(MAIN,): Source.FORGOTTEN}  # it may ask for it again
    again = {("u", "main", RESOURCE): frozenset({"GPU-2"})}
    record = join(record, bare, {**other, **again}, view, same_kubelet=True, fresh=True, read=True)
    assert {each.ids for each in record.joined.holdings if each.pod == "p"} == {("GPU-2",)}
    view = View({}, complete=True)
    record = join(record, Record(), other, view, same_kubelet=True, fresh=True, read=True)
    assert not [each for each in record.joined.holdings if each.pod == "p"]


def test_one_container_that_has_units_again_takes_none_from_the_others() -> None:
    view = View({"u": a_pod("ns", "p", (), "u", phase="Running")}, complete=True)
    names = (("ns", "p", "main"), ("ns", "p", "second"))
    held = {"main": MAIN, "second": "GPU-2"}
    entries = {("u", container, RESOURCE): frozenset({gpu}) for container, gpu in held.items()}
    listed = Record((), names)
    record = join(Evidence(), listed, entries, view, same_kubelet=True, fresh=True, read=True)
    record = join(record, Record(), {}, view, same_kubelet=False, fresh=True, read=False)
    again = {("u", "main", RESOURCE): frozenset({"GPU-3"})}
    for entries in ({}, again, again):
        record = join(record, listed, entries, view, same_kubelet=True, fresh=True, read=bool(entries))
    assert {each.ids[0] for each in record.joined.holdings} == {"GPU-3", "GPU-2"}


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


def test_holder_that_its_kubelet_forgot_may_live_while_the_api_server_is_away() -> None:
    silent = View(away=True)
    before = join(Evidence(), LISTED, ENTRIES, silent, same_kubelet=True, fresh=True, read=True)
    blind = join(before, Record(), {}, silent, same_kubelet=False, fresh=True)
    assert {each.ids for each in blind.joined.holdings} == {(INIT,), (MAIN,)}
    assert blind.joined.away
    assert blind.joined.uids == {("ns", "p"): "u"}
    two = {**ENTRIES, ("v", "main", RESOURCE): frozenset({MAIN})}  # one of them may be over
    named = View({uid: a_pod("ns", "p", (), uid) for uid in ("u", "v")}, complete=True)
    assert not join(Evidence(), LISTED, two, named, same_kubelet=True, fresh=True, read=True).joined.uids
    # It has listed the pod, and does so no more.
    heard = join(before, LISTED, ENTRIES, silent, same_kubelet=False, fresh=True, read=True)
    assert not join(heard, Record(), ENTRIES, silent, same_kubelet=True, fresh=True).joined.holdings
    # Where nobody is asked, and where the answer has come, what its checkpoint lacks is nobody's.
    for spoken in (View(), View(complete=True), View(away=True, over={"u"})):
        assert not join(before, Record(), {}, spoken, same_kubelet=False, fresh=True).joined.holdings


def test_init_container_that_the_kubelet_has_forgotten_asks_again() -> None:
    pod = a_pod(
        "ns",
        "p",
        (Container("main", {VGPU.memory: 8}), Container("init", {VGPU.memory: 8}, Stage.INIT)),
        "u",
        phase="Running",
    )
    view, units = View({"u": pod}, complete=True), frozenset({"GPU-0::m0"})
    listed = Record((), (("ns", "p", "main"),))

    def asking(record: Evidence) -> list[str]:
        held = PairHoldings.of(VGPU, record.joined)
        found = askers(VGPU, PairMember.MEMORY, 8, record.joined, held, [pod], ())
        assert held.ids == units  # nobody else gets them
        return [each.container.name for each in found]

    known = {("u", "init", VGPU.memory): units}
    record = join(Evidence(), listed, known, view, same_kubelet=True, fresh=True, read=True)
    assert asking(record) == ["main"]
    # The kubelet starts without its checkpoint, and admits the pod again, from its first container on.
    record = join(record, listed, {}, view, same_kubelet=False, fresh=True)
    assert asking(record) == ["init"]
    # Neither an event between two readings nor a checkpoint that cannot be read says more.
    record = join(record, record.listed, record.entries, view, same_kubelet=True, fresh=False)
    assert asking(record) == ["init"]
    record = join(record, listed, known, view, same_kubelet=True, fresh=True, read=True)
    assert asking(record) == ["main"]


async def test_pods_are_known_once_every_source_has_spoken(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.watch.known_pods() is None  # nothing was read
    node.know("u", "web-0")
    node.kubelet.pods = {"web-0": {"main": "GPU-A"}}
    node.kubelet.records(("u", "main", "GPU-A"), ("over", "prepare", "GPU-B"))
    await node.held()
    assert node.watch.known_pods() == frozenset({"u"})
    node.kubelet.pods["static"] = {"main": ""}  # nobody says its UID
    await node.held()
    assert node.watch.known_pods() is None
    node.know("s", "static")
    await node.held()
    assert "s" in (node.watch.known_pods() or ())
    node.complete = False
    assert node.watch.known_pods() is None


async def test_a_static_pod_without_a_mirror_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, static, now = Node(tmp_path), "0123456789abcdef" * 2, 100.0
    monkeypatch.setattr(holdings, "monotonic", lambda: now)
    node.know("u", "web-0")
    node.kubelet.pods = {"web-0": {"main": ""}, "dns-node1": {"main": ""}}
    await node.held()
    node.heard = 100.0 + LAG_SECONDS
    assert node.watch.known_pods() is None  # the watch may show it yet
    node.heard += 1
    assert node.watch.known_pods() == frozenset({"u"})
    assert node.watch.may_be_static(static)
    assert not node.watch.may_be_static("01234567-89ab-cdef-0123-456789abcdef")
    now = 110.0
    node.kubelet.pods["new"] = {"main": ""}
    await node.held()
    assert node.watch.known_pods() is None
    node.know("n", "new")
    assert node.watch.known_pods() == frozenset({"u", "n"})  # however often the other is listed
    del node.kubelet.pods["dns-node1"]
    await node.held()
    assert not node.watch.may_be_static(static)


async def test_a_static_pod_that_holds_a_gpu_is_known_by_the_checkpoint(tmp_path: Path) -> None:
    node, static = Node(tmp_path), "0123456789abcdef" * 2
    node.kubelet.pods = {"dns-node1": {"main": "GPU-A"}}
    node.kubelet.records((static, "main", "GPU-A"))
    await node.held()
    assert node.watch.known_pods() == frozenset({static})
    assert not node.watch.may_be_static("f" * 32)
