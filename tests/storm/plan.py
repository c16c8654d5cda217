"""The choices of a seed for a storm, written out: so that one can be kept, and be the same storm later on.

A seed names a storm for as long as nobody adds an event. What was found is kept in `seeds/` event by event:
each by its name and its number, by which it makes its own choices.
"""

import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from agent.model.modes import Mode
from tests.storm.acts import ACTS, CLAIMS, USERS, Act, families, later_families, name_of
from tests.storm.tempo import BUSY, FEWER, SPARSE, tempo_of
from tests.storm.world import Shape

SEEDS = Path(__file__).parent / "seeds"


class Plan(msgspec.Struct, frozen=True):
    """A storm."""

    seed: int
    shape: Shape
    label: str  # that the node has when the agent starts
    pause: float  # seconds between its start and the first event
    calm: Mode  # that is asked for in the end
    events: list[tuple[str, int]]  # name of the act, number of the event
    showed: str = ""  # what the storm found, for people
    families: list[str] = []  # of faults
    tempo: str = SPARSE  # those that were kept before there were others
    sockets: bool = True  # between the API server and its clients; else `direct_http`

    def acts(self) -> list[tuple[int, Act]]:
        """The events by number. Raises KeyError for one that is not known any more."""
        return [(number, ACTS[name]) for name, number in self.events]

    def text(self) -> str:
        """As it is kept in a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def read(file: Path) -> Plan:
    """A plan that was kept. Raises msgspec.DecodeError."""
    return msgspec.json.decode(file.read_bytes(), type=Plan)


def planned(
    seed: int,
    steps: int,
    skip: Collection[int] = (),
    wanted: frozenset[str] | None = None,
    tempo: str | None = None,
) -> Plan:
    """The storm of a seed, with so many events; fewer where the seed makes it one that is not dense.

    `skip`: numbers of events to leave out. `wanted`, `tempo`: families of faults, and how quickly events
    follow each other, in place of the seed's choice.
    """
    if tempo is None:
        tempo = tempo_of(seed)
        steps //= FEWER[tempo]
    rng = random.Random(seed)
    shape = Shape.of(rng, seed)
    if wanted is None and shape.claims:
        shape = replace(shape, mps=True)  # their shares are
    # One in four has no fault at all: then no pod that fits may be refused.
    chosen = [] if rng.random() < 0.25 else [family for family in families(shape) if rng.random() < 0.4]
    if chosen:
        later = random.Random(f"later families of {seed}")
        chosen += [
            family for family in later_families(shape) if later.random() < 0.4 and family is not CLAIMS
        ]
    if wanted is not None:
        shape = Shape(
            mps=shape.mps or not wanted.isdisjoint(("mps daemons", "mps clients", CLAIMS.name)),
            resize=shape.resize or "resizes" in wanted,
            extender=any("extender" in each for each in wanted),
            mig=not wanted.isdisjoint(("instances", "instance faults")),
            claims=CLAIMS.name in wanted,
        )
        known = (*families(shape), *later_families(shape))
        chosen = [family for family in known if family.name in wanted]
    weights = {act: weight * BUSY[tempo] for act, weight in USERS.weights.items()}
    for family in chosen:
        weights |= family.weights
    if shape.claims:
        weights |= {act: weight * BUSY[tempo] for act, weight in CLAIMS.weights.items()}
    words = ("pgpu", "vgpu", "mixed", *(("mps", "shared") if shape.mps else ()))
    label = rng.choice((*words, "dra", "dra", "dra", "doors", "others") if shape.claims else words)
    label = "parts" if shape.mig else label
    pause = rng.choice((0.0, 0.5, 3.0))
    acts = rng.choices(list(weights), list(weights.values()), k=steps)
    modes = (Mode.VGPU, Mode.PGPU, *((Mode.MPS, Mode.MPS) if shape.mps else ()))
    calm = rng.choice((*modes, Mode.DRA, Mode.DRA, Mode.DRA) if shape.claims else modes)
    events = [(name_of(act), number) for number, act in enumerate(acts) if number not in skip]
    sockets = tempo == SPARSE or random.Random(f"sockets of {seed}").random() < 0.2
    names = [family.name for family in chosen]
    return Plan(seed, shape, label, pause, calm, events, families=names, tempo=tempo, sockets=sockets)
