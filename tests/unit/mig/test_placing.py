"""The way from the instances that a GPU has to the wanted ones: what is held or others' stays."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mig.placing import Making, Misfit, Standing, Steps, plan_layout, sentences
from agent.nvml.port import GpuInstance, MigProfile

PROFILES = (
    MigProfile(19, "1g.10gb", 1, 1, tuple(range(7)), 7),
    MigProfile(14, "2g.20gb", 2, 2, (0, 2, 4), 3),
    MigProfile(9, "3g.40gb", 3, 4, (0, 4), 2),
    MigProfile(5, "4g.40gb", 4, 4, (0,), 1),
    MigProfile(0, "7g.80gb", 7, 8, (0,), 1),
    MigProfile(20, "1g.10gb+me", 1, 1, tuple(range(7)), 1),
    MigProfile(15, "1g.20gb", 1, 2, (0, 2, 4, 6), 4),
)
BY_NAME = {each.name: each for each in PROFILES}


def standing(
    name: str, start: int, number: int, *, ours: bool = True, holder: str = "", half: bool = False
) -> Standing:
    profile = BY_NAME[name]
    computes = () if half else (0,)
    instance = GpuInstance(number, profile.number, start, profile.size, computes, not half)
    return Standing(instance, name, ours, holder, "" if half else f"MIG-{number}")


def plan(wanted: Sequence[str], *there: Standing) -> Steps:
    return plan_layout(PROFILES, wanted, there)


def test_an_empty_gpu_is_filled() -> None:
    steps = plan(["1g.10gb", "3g.40gb", "2g.20gb"])
    assert [(each.profile.name, each.start) for each in steps.make] == [
        ("3g.40gb", 0),
        ("2g.20gb", 4),
        ("1g.10gb", 6),
    ]
    assert steps.makeable == steps.make


def test_what_is_there_already_is_kept() -> None:
    there = [standing("2g.20gb", 0, 1), standing("3g.40gb", 4, 2, holder="ns/pod"), standing("1g.10gb", 2, 3)]
    assert not plan(["3g.40gb", "2g.20gb", "1g.10gb"], *there)
    assert not plan(
        ["3g.40gb", "2g.20gb", "1g.10gb"],
        *(standing(s.profile, s.instance.start, s.instance.number, ours=False) for s in there),
    )


def test_a_held_one_is_drained_and_its_place_waited_for() -> None:
    """The free half is used at once, and what needs the other half waits."""
    held = standing("3g.40gb", 0, 1, holder="ns/pod")
    free = standing("3g.40gb", 4, 2)
    steps = plan(["2g.20gb", "2g.20gb", "1g.10gb"], held, free)
    assert steps.drain == (held,)
    assert steps.destroy == (free,)
    starts = {each.start: each.behind for each in steps.make}
    assert starts[4] == (2,)
    assert starts[6] == (2,)
    assert [behind for start, behind in starts.items() if start < 4] == [(1,)]
    assert sentences(steps) == [
        "destroy 3g.40gb (GPU instance 2)",
        "drain 3g.40gb (GPU instance 1), held by ns/pod",
        "make 2g.20gb at slice 0 after 3g.40gb (GPU instance 1)",
        "make 2g.20gb at slice 4 after 3g.40gb (GPU instance 2)",
        "make 1g.10gb at slice 6 after 3g.40gb (GPU instance 2)",
    ]


def test_a_running_one_stays_where_it_is_wanted() -> None:
    """Of two alike the free one goes, and the held one is one of the wanted."""
    held, free = standing("1g.10gb", 3, 1, holder="ns/pod"), standing("1g.10gb", 0, 2)
    steps = plan(["1g.10gb", "3g.40gb"], held, free)
    assert steps.destroy == (free,)
    assert not steps.drain
    assert [(each.profile.name, each.start) for each in steps.make] == [("3g.40gb", 4)]


def test_foreign_ones_are_obstacles_or_what_is_wanted() -> None:
    foreign = standing("2g.20gb", 2, 1, ours=False)
    steps = plan(["3g.40gb", "1g.10gb"], foreign)
    assert [(each.profile.name, each.start) for each in steps.make] == [("3g.40gb", 4), ("1g.10gb", 0)]
    with pytest.raises(
        Misfit, match=r"3g.40gb have no place beside .* 2g.20gb \(GPU instance 1\).*adoptForeign"
    ):
        plan(["3g.40gb", "3g.40gb"], foreign)
    assert plan(["3g.40gb", "3g.40gb"], standing("2g.20gb", 2, 1)).destroy
    with pytest.raises(Misfit, match="have no place"):
        plan(["1g.10gb+me", "7g.80gb"][:1], standing("1g.10gb+me", 1, 1, ours=False, half=True))


def test_what_was_half_made_is_made_again() -> None:
    half = standing("3g.40gb", 0, 1, half=True)
    steps = plan(["3g.40gb"], half)
    assert steps.destroy == (half,)
    assert [each.start for each in steps.make] in ([0], [4])


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (["1g.5gb"], "it has no MIG profile 1g.5gb, it has 1g.10gb, 2g.20gb, 3g.40gb"),
        (["3g.40gb"] * 3, "it has room for 2 of 3g.40gb, not for 3"),
        (["4g.40gb", "3g.40gb", "1g.10gb"], "4g.40gb, 3g.40gb, 1g.10gb do not fit together"),
        (["7g.80gb", "1g.10gb"], "do not fit together; ask for fewer or smaller"),
    ],
)
def test_what_cannot_be_is_refused(wanted: list[str], says: str) -> None:
    with pytest.raises(Misfit, match=says):
        plan(wanted)


@st.composite
def gpus(draw: st.DrawFn) -> list[Standing]:
    """Instances that do not overlap, of all kinds."""
    found: list[Standing] = []
    taken: set[int] = set()
    counts: Counter[str] = Counter()
    for number in range(draw(st.integers(0, 7))):
        profile = draw(st.sampled_from(PROFILES))
        start = draw(st.sampled_from(profile.starts))
        span = set(range(start, start + profile.size))
        if span & taken or counts[profile.name] >= profile.most:
            continue
        taken |= span
        counts[profile.name] += 1
        ours, half = draw(st.booleans()), draw(st.integers(0, 4)) == 0
        holder = "ns/pod" if not half and draw(st.booleans()) else ""
        found.append(standing(profile.name, start, number + 1, ours=ours, holder=holder, half=half))
    return found


def after(there: list[Standing], steps: Steps) -> list[Standing]:
    """The GPU once what can be done at once is done."""
    for step in steps.destroy:
        assert step.ours
        assert not step.holder
        there = [each for each in there if each != step]
    number = max((each.instance.number for each in there), default=0)
    for making in steps.make:
        if any(making.slices & each.slices for each in there):
            continue
        number += 1
        there = [*there, standing(making.profile.name, making.start, number)]
    return there


@given(gpus(), st.lists(st.sampled_from(sorted(BY_NAME)), max_size=6))
def test_every_plan_leads_to_its_layout_and_harms_nobody(there: list[Standing], wanted: list[str]) -> None:
    try:
        steps = plan(wanted, *there)
    except Misfit:
        return
    for each in steps.makeable:
        assert isinstance(each, Making)
        assert not any(each.slices & one.slices for one in there)
    # Holders end one after the other, and nothing that was made is destroyed again.
    made: list[Standing] = []
    for _ in range(10):
        before = there
        there = after(there, steps)
        made += [each for each in there if each not in before]
        assert all(each in there for each in before if not each.ours or each.holder)
        steps = plan(wanted, *there)
        assert not any(each in made for each in steps.destroy)
        draining = {each.instance.number for each in steps.drain}
        if not draining:
            break
        leaving = min(draining)
        there = [
            standing(each.profile, each.instance.start, each.instance.number)
            if each.instance.number == leaving
            else each
            for each in there
        ]
        steps = plan(wanted, *there)
    there = after(there, steps)
    assert not plan(wanted, *there)
    whole = Counter(each.profile for each in there if each.instance.whole)
    assert all(whole[name] >= count for name, count in Counter(wanted).items())
