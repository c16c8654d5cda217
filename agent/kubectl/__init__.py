"""`kubectl gpu`: sources of one file of Python's standard library, `kubectl-gpu`, which `make docs` joins.

Modules import each other by `from agent.kubectl.x import y` alone, and no two have a name in common.
"""
