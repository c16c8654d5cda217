"""From the profiles that a GPU shall have, and the instances that it has, to the steps between: pure.

The driver says where an instance of a profile may begin, and no two share a slice of memory. Of all ways to
place what is wanted the one is taken that ends the fewest instances which somebody holds, then the one that
can be made at once, then the one that keeps most of what is there. An instance that others made is an
obstacle, unless it is a wanted one; one that somebody holds is waited for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.nvml.port import GpuInstance, MigProfile


@dataclass(frozen=True, slots=True)
class Standing:
    """An instance that is there."""

    instance: GpuInstance
    profile: str
    ours: bool  # whether this agent may destroy it
    holder: str = ""  # who has it, in words; empty: nobody
    uuid: str = ""  # empty: half made, or shared by several compute instances

    @property
    def slices(self) -> frozenset[int]:
        """Of memory, by number."""
        return frozenset(range(self.instance.start, self.instance.start + self.instance.size))


@dataclass(frozen=True, slots=True)
class Making:
    """An instance that is to be made."""

    profile: MigProfile
    start: int
    behind: tuple[int, ...] = ()  # instances that have to go first, by number

    @property
    def slices(self) -> frozenset[int]:
        return frozenset(range(self.start, self.start + self.profile.size))


@dataclass(frozen=True, slots=True)
class Steps:
    """The way to a layout; without steps it is reached."""

    destroy: tuple[Standing, ...] = ()  # ours, and nobody's
    drain: tuple[Standing, ...] = ()  # ours, until their holders have ended
    make: tuple[Making, ...] = ()

    @property
    def makeable(self) -> tuple[Making, ...]:
        """Those that have room now."""
        return tuple(each for each in self.make if not each.behind)

    def __bool__(self) -> bool:
        return bool(self.destroy or self.drain or self.make)


class Misfit(Exception):
    """A GPU cannot have the instances that a layout asks for; the text names profile and remedy."""


def plan_layout(profiles: Sequence[MigProfile], wanted: Sequence[str], there: Sequence[Standing]) -> Steps:
    """The steps by which the instances become the wanted ones. Raises Misfit."""
    chosen = _named(profiles, wanted)
    if next(_arrangements(chosen, ()), None) is None:
        raise Misfit(f"{_list(wanted)} do not fit together; ask for fewer or smaller instances")
    found = [
        (_cost(places, there), number, places)
        for number, places in enumerate(_arrangements(chosen, there))
        if not _crowded(places, there)
    ]
    if not found:
        others = [each for each in there if not each.ours]
        names = ", ".join(f"{each.profile} (GPU instance {each.instance.number})" for each in others)
        raise Misfit(
            f"{_list(wanted)} have no place beside instances that this agent did not make: {names}; "
            "destroy them with nvidia-smi mig -dci and -dgi, ask for instances that fit beside them, or set "
            "mig.adoptForeign: true"
        )
    return _steps(min(found)[2], there)


def _named(profiles: Sequence[MigProfile], wanted: Sequence[str]) -> list[MigProfile]:
    """The profiles by their names, the largest first. Raises Misfit."""
    known = {each.name: each for each in profiles if each.name}
    for name, count in Counter(wanted).items():
        if name not in known:
            raise Misfit(
                f"it has no MIG profile {name}, it has {', '.join(known) or 'none'}: ask for one of these, "
                "and give GPUs of another kind an entry of their own"
            )
        if count > known[name].most:
            raise Misfit(f"it has room for {known[name].most} of {name}, not for {count}")
    return sorted((known[name] for name in wanted), key=lambda each: (-each.size, each.number))


def _arrangements(
    wanted: Sequence[MigProfile], there: Sequence[Standing], placed: tuple[Making, ...] = ()
) -> Iterator[tuple[Making, ...]]:
    """All ways to place what is wanted around instances of others; alike ones stand in one order."""
    if len(placed) == len(wanted):
        yield placed
        return
    profile, taken = wanted[len(placed)], frozenset[int]().union(*(each.slices for each in placed))
    alike = [each.start for each in placed if each.profile is profile]
    for start in profile.starts:
        making = Making(profile, start)
        if start <= max(alike, default=-1) or making.slices & taken:
            continue
        blocked = any(
            not each.ours and not _is(making, each) and making.slices & each.slices for each in there
        )
        if not blocked:
            yield from _arrangements(wanted, there, (*placed, making))


def _is(making: Making, standing: Standing) -> bool:
    """Whether an instance is the one that is wanted there already."""
    there = standing.instance
    return there.whole and (there.profile, there.start) == (making.profile.number, making.start)


def _kept(places: Sequence[Making], there: Sequence[Standing]) -> list[Standing]:
    return [each for each in there if any(_is(making, each) for making in places)]


def _crowded(places: Sequence[Making], there: Sequence[Standing]) -> bool:
    """Whether a GPU has no room for so many of one profile, whatever their places."""
    others = Counter(
        each.instance.profile for each in there if not each.ours and each not in _kept(places, there)
    )
    counts = Counter(each.profile for each in places)
    return any(count + others[profile.number] > profile.most for profile, count in counts.items())


def _cost(places: Sequence[Making], there: Sequence[Standing]) -> tuple[int, int, int, int]:
    kept = _kept(places, there)
    gone = [each for each in there if each.ours and each not in kept]
    held = [each for each in gone if each.holder]
    waiting = sum(any(making.slices & each.slices for each in held) for making in places)
    foreign = sum(not each.ours for each in kept)
    return len(held), waiting, -foreign, len(gone) - len(held)


def _steps(places: Sequence[Making], there: Sequence[Standing]) -> Steps:
    kept = _kept(places, there)
    gone = [each for each in there if each.ours and each not in kept]
    missing = [each for each in places if not any(_is(each, standing) for standing in there)]
    make = []
    for each in missing:
        behind = tuple(one.instance.number for one in gone if one.slices & each.slices)
        make.append(Making(each.profile, each.start, behind))
    return Steps(
        tuple(each for each in gone if not each.holder),
        tuple(each for each in gone if each.holder),
        tuple(make),
    )


def sentences(steps: Steps) -> list[str]:
    """The steps in words, for people."""
    called: Mapping[int, str] = {
        each.instance.number: f"{each.profile} (GPU instance {each.instance.number})"
        for each in (*steps.destroy, *steps.drain)
    }
    found = [f"destroy {called[each.instance.number]}" for each in steps.destroy]
    found += [f"drain {called[each.instance.number]}, held by {each.holder}" for each in steps.drain]
    for each in steps.make:
        after = f" after {', '.join(called[number] for number in each.behind)}" if each.behind else ""
        found.append(f"make {each.profile.name} at slice {each.start}{after}")
    return found


def _list(wanted: Sequence[str]) -> str:
    counts = Counter(wanted)
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
