"""How the compute of one GPU is shared out: promises first, then what is free, to those who may have it.

A container was promised the cores that it asked for. One that works keeps all of its promise, however little
it uses, since its need for the rest could not be seen in time. The rest, promises of idle ones among it, goes
to containers that may burst, and what these leave to those of low priority. A container that asked for no
cores has no promise, and runs like one of low priority.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

WHOLE = 100.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a container to its GPU, in percent."""

    key: str
    cores: int  # asked for
    most: int  # up to which free compute may be used; cores where that is none
    low: bool = False

    @property
    def promised(self) -> int:
        """Its promise, which it gets whenever it works."""
        return 0 if self.low else self.cores


def claim(key: str, cores: int, burst: int | None, *, low: bool) -> Claim:
    """A container's claim, from what it and its annotations say."""
    idle_only = low or cores == 0
    most = burst if burst is not None else (100 if idle_only else cores)
    return Claim(key, cores, min(100, most if idle_only else max(cores, most)), idle_only)


def elastic(claims: Collection[Claim]) -> bool:
    """Whether anybody's share depends on what others do."""
    return any(each.most > each.promised for each in claims)


def allot(claims: Sequence[Claim], working: Collection[str]) -> Mapping[str, float]:
    """Percent of the GPU by key. One that idles may have its promise at any moment all the same."""
    found = {each.key: float(each.promised) for each in claims}
    free = WHOLE - sum(each.promised for each in claims if each.key in working)
    for low in (False, True):
        takers = [each for each in claims if each.low is low and each.most > each.promised]
        working_takers = [each for each in takers if each.key in working]
        # One that idles must be able to begin: it is offered what would be left for it.
        for each in takers:
            if each.key not in working:
                rest = [*working_takers, each]
                own = free - (0 if each.low else each.promised)
                found[each.key] += _poured(rest, own)[each.key]
        for key, extra in _poured(working_takers, free).items():
            found[key] += extra
            free -= extra
    return found


def _poured(takers: Sequence[Claim], free: float) -> dict[str, float]:
    """The rest in equal parts, to nobody more than it may have beyond its promise."""
    found = {each.key: 0.0 for each in takers}
    left = sorted(takers, key=lambda each: each.most - each.promised)
    free = max(0.0, free)
    while left:
        part = free / len(left)
        first = left.pop(0)
        found[first.key] = min(part, first.most - first.promised)
        free -= found[first.key]
    return found
