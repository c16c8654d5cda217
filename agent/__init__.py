"""GPU node agent: one process per GPU node, three ways of sharing, switched live."""

# What is built of a commit says which one, too (.ci/build_version.py).
__version__ = "0.3.0.dev0"
