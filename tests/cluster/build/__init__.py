"""Builds the programs of the test cluster into the user's cache.

Public face: `build_parts()` returns the `Parts` of the selected Kubernetes minor, building what is missing.
"""

from tests.cluster.build.errors import BuildError
from tests.cluster.build.parts import Parts, build_parts, missing_parts

__all__ = ["BuildError", "Parts", "build_parts", "missing_parts"]
