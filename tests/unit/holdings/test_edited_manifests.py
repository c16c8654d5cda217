"""A static pod whose manifest is edited: the kubelet lists the next one by its name; the mirror stands."""

from dataclasses import replace

import pytest

from agent.holdings.record import Entries, Evidence, View, join
from agent.model.holding import Holding, Record
from tests.pods import a_pod

GPU, KEY, FIRST = "nvidia.com/gpu", ("ns", "static-node1"), "1" * 32
MIRROR = a_pod(*KEY, (), "mirror", phase="Running")
ENTRIES: Entries = {(FIRST, "main", GPU): frozenset({"GPU-0"})}
HOLDS = Record((Holding(*KEY, "main", GPU, ("GPU-0",)),), ((*KEY, "main"),), began=1.0)
BARE = Record((), ((*KEY, "main"),), began=2.0)


def read(
    before: Evidence,
    listed: Record,
    *,
    entries: Entries = ENTRIES,
    mirror: bool = True,
    same: bool = True,
    torn: bool = False,
) -> Evidence:
    """The next reading. `torn`: the checkpoint cannot be read now."""
    view = View({FIRST: MIRROR} if mirror else {}, complete=True)
    return join(before, listed, entries, view, same_kubelet=same, fresh=True, read=not torn)


@pytest.fixture
def held() -> Evidence:
    """The first one holds a GPU."""
    found = read(Evidence(), HOLDS)
    assert found.joined.holdings == HOLDS.holdings
    return found


def test_what_the_last_one_had_is_free_for_the_next(held: Evidence) -> None:
    found = read(held, BARE)
    assert not found.joined.holdings
    assert not read(found, replace(BARE, began=3.0)).joined.holdings


def test_so_it_is_where_no_reading_had_shown_it_yet() -> None:
    """The edit came within half a second."""
    empty = read(Evidence(), Record((), (), began=0.5), entries={}, mirror=False)
    assert not read(empty, BARE).joined.holdings


def test_it_is_the_next_ones_when_that_has_it(held: Evidence) -> None:
    after = {("2" * 32, "main", GPU): frozenset({"GPU-0"})}
    found = read(read(held, BARE), replace(HOLDS, began=3.0), entries=after)
    assert [each.pod_key for each in found.joined.holdings] == [KEY]


@pytest.mark.parametrize(
    ("listed", "changes"),
    [
        (BARE, {"same": False}),  # one that has lost its checkpoint lists pods that run alike
        (BARE, {"same": False, "entries": {}}),
        (BARE, {"torn": True}),
        (Record((), (), began=2.0), {"same": False}),  # not heard of yet
        (Record((), ((*KEY, "other"),), began=2.0), {}),  # a plain init container's, which no list shows
    ],
)
def test_what_one_that_may_run_has_is_kept(
    held: Evidence, listed: Record, changes: dict[str, object]
) -> None:
    found = read(held, listed, **changes)  # type: ignore[arg-type]
    assert [each.ids for each in found.joined.holdings] == [("GPU-0",)]


def test_what_one_in_admission_has_is_kept() -> None:
    """It has no mirror yet, and a kubelet may lose what it has just given."""
    before = read(Evidence(), HOLDS, mirror=False)
    assert read(before, BARE, mirror=False).joined.holdings
