"""Quantities of Kubernetes."""

import re

_EXPONENTIAL = re.compile(r"([0-9]{1,18})[eE]\+?([0-9]{1,2})")
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def units(quantity: str) -> int:
    """A Kubernetes quantity of an extended resource: whole, perhaps as `1k` or `1e3`. Raises ValueError."""
    if exponential := _EXPONENTIAL.fullmatch(quantity):
        return int(exponential[1] + int(exponential[2]) * "0")
    digits = quantity.rstrip("kKMGi")
    suffix = quantity[len(digits) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"{quantity!r} is not a whole number of units")
    return int(digits) * _SUFFIXES[suffix]
