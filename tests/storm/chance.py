"""All that comes from the operating system by chance, drawn from the seed.

Files that the agent names by chance are torn, mended and removed in the order of their names, and the order
of a set of paths depends on the name of the storm's folder: the same seed must have the same names.
"""

import os
import random
import tempfile
from collections.abc import Iterator


def _names(rng: random.Random) -> Iterator[str]:
    while True:
        yield f"{rng.getrandbits(40):010x}"


def install(seed: int) -> None:
    """Draw the same from here on as the last time, for this process: `secrets`, `uuid` and `tempfile`.

    Another process that lives through this seed has the folder of that name: this one has the next then.
    """
    rng = random.Random(f"names of {seed}")
    os.urandom = rng.randbytes
    random._urandom = rng.randbytes  # type: ignore[attr-defined]
    tempfile._name_sequence = _names(rng)  # type: ignore[attr-defined]
