"""Why a node or a cluster cannot be cleaned up."""


class CleanupFailed(Exception):
    """It did not work this time; the text names cause and remedy."""


class CleanupRefused(CleanupFailed):
    """Pods stand in the way: trying again is of no use before they have ended."""
