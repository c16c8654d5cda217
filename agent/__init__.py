"""GPU node agent: one process per GPU node, three ways of sharing, switched live."""

__version__ = "0.2.0"
