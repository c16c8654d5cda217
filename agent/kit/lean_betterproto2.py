"""Imported before betterproto2, which then comes in without importlib.metadata: 0.7 MiB less.

betterproto2 asks importlib.metadata (email, csv, zipfile and more) for its own version, only to check that
it fits the compiler that wrote the generated modules. The requirement in pyproject.toml states the same,
and tests/unit/kit/test_lean_betterproto2.py makes the check, so a stand-in takes that module's place.
"""

import sys
import types

_MODULE = "betterproto2._version"


def _check_compiler_version(_: str) -> None:
    """See the head of this module."""


if "betterproto2" not in sys.modules:
    _stand_in = types.ModuleType(_MODULE)
    vars(_stand_in).update(__version__="not read", check_compiler_version=_check_compiler_version)
    sys.modules[_MODULE] = _stand_in
