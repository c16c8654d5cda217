"""Errors between the agent and MPS control daemons."""


class MpsError(Exception):
    """Something around an MPS control daemon failed."""


class ProgramMissing(MpsError):
    """`nvidia-cuda-mps-control` is not on this node."""


class BadFolder(MpsError):
    """The folders of a daemon cannot be used."""


class Unanswered(MpsError):
    """The daemon gave no answer: it is not there, hangs, or was busy with somebody else for too long."""


class DaemonRefused(MpsError):
    """The daemon answered, but not with what was asked for."""


class NotSupported(DaemonRefused):
    """This version of the daemon has no such command."""


class StartFailed(MpsError):
    """The daemon could not be started."""
