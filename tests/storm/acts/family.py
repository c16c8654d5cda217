"""Kinds of events."""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from tests.storm.world import World

Act = Callable[[World, random.Random], Awaitable[str]]


@dataclass(frozen=True)
class Family:
    """Events that a storm has or has not: `weights` says how often each comes."""

    name: str
    weights: Mapping[Act, int]
