"""Which figures there are, their budgets, and who takes them."""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.conditions import Conditions


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure as it stands in the report. `budget` is the most that it may be; None: shown, not judged."""

    name: str
    unit: str
    budget: float | None
    what: str

    @property
    def tail(self) -> bool:
        """Whether it is a high percentile."""
        return "_p99" in self.name or "99th percentile" in self.what


@dataclass(frozen=True, slots=True)
class Taken:
    """A measured value and how many single readings it comes from."""

    value: float
    n: int


Take = Callable[[Conditions], Awaitable[Mapping[str, Taken]]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run that gives one or several figures."""

    figures: tuple[Figure, ...]
    take: Take
    cluster: bool = False  # it starts the test cluster, which takes minutes to build once


MEASUREMENTS: list[Measurement] = []


def measurement(*figures: Figure, cluster: bool = False) -> Callable[[Take], Take]:
    """Register a coroutine that takes all of these figures, by name. `cluster`: in the group of that name."""

    def register(take: Take) -> Take:
        taken_names = {figure.name for one in MEASUREMENTS for figure in one.figures}
        for figure in figures:
            if figure.name in taken_names:
                raise ValueError(f"two measurements take the figure {figure.name}")
        MEASUREMENTS.append(Measurement(figures, take, cluster))
        return take

    return register


def discover() -> Sequence[Measurement]:
    """All measurements, after importing every module of `tests.bench.figures`."""
    package = importlib.import_module("tests.bench.figures")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return MEASUREMENTS


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
