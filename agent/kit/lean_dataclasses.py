"""Imported before all others: dataclasses then works out no signatures, 8 % of the time of all imports.

Without docstrings, as in the image (`-OO`), it makes the text of its signature the docstring of each class,
which nobody reads.
"""

import dataclasses
import inspect
import sys
import types


def _no_signature(*_: object, **__: object) -> str:
    """The docstring is the class's name alone."""
    return ""


if sys.flags.optimize >= 2:
    _stand_in = types.ModuleType(inspect.__name__)
    vars(_stand_in).update(vars(inspect), signature=_no_signature)
    vars(dataclasses)["inspect"] = _stand_in
