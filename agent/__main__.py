"""`python -m agent`."""

import sys

import agent.kit.lean_dataclasses
from agent.cli.main import main

assert agent.kit.lean_dataclasses  # works by being imported first
sys.exit(main())
