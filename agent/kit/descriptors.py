"""How many files and connections the process may have open."""

import resource

import structlog

log = structlog.get_logger()


def raise_limit() -> None:
    """Raise the soft limit to the hard one: where it is 1,024, it is so for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("descriptor_limit_stays", limit=soft, wanted=hard, problem=str(error))
