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


def test_so_it_is_with_the_second_container_when_the_first_has_what_the_last_ones_had() -> None:
    entries: Entries = {**ENTRIES, (FIRST, "side", GPU): frozenset({"GPU-1"})}
    names = ((*KEY, "main"), (*KEY, "side"))
    side = Holding(*KEY, "side", GPU, ("GPU-1",))
    before = read(Evidence(), Record((*HOLDS.holdings, side), names, began=1.0), entries=entries)
    found = read(before, Record((), names, began=2.0), entries=entries)
    assert not found.joined.holdings
    found = read(found, Record(HOLDS.holdings, names, began=3.0), entries=entries)
    assert found.joined.holdings == HOLDS.holdings


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


def test_what_a_kubelet_lists_no_more_of_a_share_is_kept() -> None:
    """The mirror is the last one's, and does not say which container asks next."""
    core = "tencent.com/vcuda-core"
    ids = ("GPU-0::c0", "GPU-0::c1")
    share = Record((Holding(*KEY, "main", core, ids),), HOLDS.containers, began=1.0)
    entries = {(FIRST, "main", core): frozenset(ids)}
    before = read(Evidence(), share, entries=entries)
    assert read(before, BARE, entries=entries).joined.holdings == share.holdings


def test_what_a_kubelet_has_never_listed_is_kept(held: Evidence) -> None:
    """It may have begun without the checkpoint that the agent can read."""
    found = read(read(held, BARE, same=False), replace(BARE, began=3.0))
    assert found.joined.holdings


def test_so_it_is_where_the_mirror_goes_and_comes_again(held: Evidence) -> None:
    before = read(read(held, BARE, same=False), replace(BARE, began=3.0), mirror=False)
    assert read(before, replace(BARE, began=4.0)).joined.holdings


def test_what_a_plain_init_container_has_is_kept() -> None:
    """No list shows it."""
    listed = Record((), ((*KEY, "other"),), began=1.0)
    before = read(Evidence(), listed)
    assert read(before, replace(listed, began=2.0)).joined.holdings


@pytest.mark.parametrize("container", ["main", "renamed"])
def test_what_it_had_stays_free_over_a_restart_of_the_kubelet(held: Evidence, container: str) -> None:
    bare = replace(BARE, containers=((*KEY, container),))
    found = read(read(held, bare), replace(bare, began=3.0), same=False)
    assert not found.joined.holdings
    assert not read(found, replace(bare, began=4.0)).joined.holdings


def test_the_first_ones_manifest_may_be_put_back(held: Evidence) -> None:
    """Its UID is the same again."""
    found = read(read(held, BARE), replace(HOLDS, began=3.0))
    assert [each.pod_key for each in found.joined.holdings] == [KEY]
    assert read(found, replace(HOLDS, began=4.0)).joined.holdings == HOLDS.holdings
