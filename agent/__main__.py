"""`python -m agent`."""

import gc
import sys

# What comes in lives for ever: to look for garbage in it takes a fifth of a start.
gc.disable()

import agent.kit.lean_dataclasses  # noqa: E402, F401  works by being imported before all others
from agent.cli.main import main  # noqa: E402

gc.freeze()
gc.enable()
sys.exit(main())
