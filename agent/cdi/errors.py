"""Errors of the CDI specification of the GPUs; each message names the remedy."""


class CdiError(Exception):
    """The specification cannot be made, or is not usable."""


class GenerationFailed(CdiError):
    """NVIDIA's program gave no specification."""


class BadSpecification(CdiError):
    """A specification that container runtimes would refuse, or that is not ours."""


class HookNotInstalled(CdiError):
    """The program that container runtimes call cannot be put on the host, or not be run there."""
