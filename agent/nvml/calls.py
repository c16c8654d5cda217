"""Calls into nvidia-ml-py, its errors as ours."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import pynvml

from agent.nvml.nvml_errors import NvmlNotSupported, error_for

Opaque: TypeAlias = Any  # nvidia-ml-py has no types; what comes from it is checked here, by use


def call(name: str, *args: Opaque) -> Opaque:
    """Call a function of pynvml. Raises NvmlError."""
    try:
        return getattr(pynvml, name)(*args)
    except pynvml.NVMLError as error:
        raise error_for(
            error.value, name.removesuffix("_v1").removesuffix("_v2").removesuffix("_v3")
        ) from error


def offered(name: str, *args: Opaque) -> Opaque:
    """The answer of a function; None where the GPU, the driver or the library has no such thing."""
    try:
        return call(name, *args)
    except NvmlNotSupported:
        return None


def first_offered(names: Iterable[str], *args: Opaque) -> Opaque:
    """The answer of the first of these functions that there is; None: there is none."""
    return next((found for name in names if (found := offered(name, *args)) is not None), None)
