"""`python -m agent`."""

import sys

import agent.kit.lean_dataclasses  # noqa: F401  works by being imported first
from agent.cli.main import main

sys.exit(main())
