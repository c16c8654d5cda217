"""The tests, which also use the build tools of the enforcement library, `clib` in the folder `.ci`."""

import sys
from pathlib import Path

_TOOLS = str(Path(__file__).parents[1] / ".ci")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)
