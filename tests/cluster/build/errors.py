"""The one error of the build: its text names the part, the cause and the remedy."""


class BuildError(Exception):
    """A part of the test cluster cannot be had on this machine."""
