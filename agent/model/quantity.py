"""Quantities of Kubernetes."""

import re
from fractions import Fraction

# The API server gives quantities back in the form that their author chose, brought to few digits.
_QUANTITY = re.compile(
    r"\+?([0-9]{1,18}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:[eE]([+-]?[0-9]{1,2})|([mkMGTPE]|[KMGTPE]i)?)"
)
_SUFFIXES = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}


def units(quantity: str) -> int:
    """A Kubernetes quantity of an extended resource: whole, in any form. Raises ValueError."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, exponent, suffix = found.groups()
    if not exponent and not suffix and number.isdigit():  # as nearly all are written
        return int(number)
    count = Fraction(number) * (Fraction(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])
    if count.denominator != 1:
        raise ValueError(f"{quantity!r} is not a whole number of units")
    return int(count)
