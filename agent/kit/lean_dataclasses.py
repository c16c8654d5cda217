"""Imported before all others: the methods of a data class are then compiled when they are first called.

Python 3.11 and 3.12 compile six texts for each class, one at a time: a quarter of a start for 290 classes, of
which most methods are never called. Later versions compile them at once, and are left as they are.

Without docstrings, as in the image (`-OO`), dataclasses makes the text of its signature the docstring of each
class, another 8 %, which nobody reads.
"""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_MAKE = "_create_fn"
_make = vars(dataclasses).get(_MAKE)


def _make_when_called(name: str, *text: Sequence[str], **context: Any) -> Callable[..., Any]:  # noqa: ANN401
    """Answer the method `name`, which puts the compiled one in its own place when it is called."""
    assert _make
    made: Callable[..., Any] | None = None

    def method(*given: Any, **named: Any) -> Any:  # noqa: ANN401  whatever the method takes and gives
        nonlocal made
        if made is None:
            made = _made(name, text, context)
            made.__qualname__ = method.__qualname__
            for owner in type(given[0]).__mro__:
                if vars(owner).get(name) is method:
                    setattr(owner, name, made)
        return made(*given, **named)

    method.__name__ = name  # dataclasses goes by it, and sets the qualified one
    return method


def _made(name: str, text: Sequence[Sequence[str]], context: dict[str, Any]) -> Callable[..., Any]:
    method: Callable[..., Any] = _make(name, *text, **context)  # type: ignore[misc]
    return method


def _no_signature(*_: object, **__: object) -> str:
    """The docstring is the class's name alone."""
    return ""


if _make:
    vars(dataclasses)[_MAKE] = _make_when_called
if sys.flags.optimize >= 2:
    _stand_in = types.ModuleType(inspect.__name__)
    vars(_stand_in).update(vars(inspect), signature=_no_signature)
    vars(dataclasses)["inspect"] = _stand_in
