"""`make bench`: figures of the running agent beside their budgets.

A later capability adds figures by adding a module to `tests/bench/figures`; it is found by itself.
"""
